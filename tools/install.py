"""Install this checkout into the running interpreter, unless its import was already built from the current C++.

A record next to the builds states which native module was built from which sources, by their contents: timestamps would
miss a file with an unexpected suffix, and would rebuild after `git switch` there and back.

With scikit-build-core and pip available this is `pip install --no-build-isolation --no-deps -e .`; on a machine with
only CMake and pybind11 (or PyTorch, which includes its headers), the native module is built into the source tree, and
PYTHONPATH must name the checkout. Neither downloads anything.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
# Everything that CMake reads and compiles, with any suffix. CUDA sources are compiled on first use, not here.
SOURCES = ("CMakeLists.txt", "qflash/csrc/bindings", "qflash/csrc/cpu", "qflash/csrc/include")
RECORD = ROOT / "build" / f"native-{sys.implementation.cache_tag}.json"


def imported() -> tuple[Path, Path] | str:
    """The qflash package and native module that `import qflash` finds, or why it finds none."""
    code = "import qflash, qflash._native as n; print(qflash.__file__); print(n.__file__)"
    # Not from the checkout: its qflash folder would be found first, installed or not.
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run([sys.executable, "-c", code], cwd=elsewhere, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    package, native = done.stdout.split("\n")[:2]
    return Path(package), Path(native)


def sources() -> dict[str, str]:
    """The sources of the native module: the path of each file in the checkout, and the digest of its contents."""
    files = (path for name in SOURCES for path in (ROOT / name, *(ROOT / name).rglob("*")) if path.is_file())
    contents = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files}
    contents["pyproject.toml"] = build_settings()
    return {name: hashlib.sha256(text).hexdigest() for name, text in contents.items()}


def build_settings() -> bytes:
    """pyproject.toml without the settings of tools that build and install nothing."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    settings["tool"] = settings["tool"].get("scikit-build")
    return json.dumps(settings, sort_keys=True).encode()


def stamp(native: Path) -> list[str | int]:
    """Identifies a build of the native module."""
    about = native.stat()
    return [str(native), about.st_mtime_ns, about.st_size]


def recorded() -> dict[str, Any]:
    """The record of the last build here: `module`, the stamp of its result, and `sources`, which it was built from."""
    try:
        return dict(json.loads(RECORD.read_text()))
    except (OSError, ValueError):
        return {}


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Files that were added, removed or edited."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def outdated() -> str | None:
    """Why a build is needed, or None."""
    found = imported()
    if isinstance(found, str):
        return found
    package, native = found
    if package.resolve().parent != ROOT / "qflash":
        return f"the installed qflash is {package.parent}, not this checkout"
    last = recorded()
    if last.get("module") != stamp(native):
        return "it is not known what the installed module was built from"
    if files := changed(last["sources"], sources()):
        return f"{files[0]} changed" if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files changed"
    return None


def build() -> None:
    """Build and install, and record what was built from what."""
    now = sources()
    for name in changed(recorded().get("sources", {}), now):
        if name in now:  # ninja compares times, and a file from elsewhere may be older than its object
            os.utime(ROOT / name)
    if is_editable():
        install_editable()
    else:
        build_in_place()
    found = imported()
    if isinstance(found, str):
        give_up(found)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps({"module": stamp(found[1]), "sources": now}, indent=1))


def is_editable() -> bool:
    """Whether the requirements of an editable install are available; otherwise the module is built in place."""
    return has("scikit_build_core") and has("pybind11") and has("pip")


def give_up(why: str) -> NoReturn:
    advice = "" if is_editable() else f"\nIt was built in the source tree: set PYTHONPATH={ROOT}"
    sys.exit(f"qflash was built and still cannot be used: {why}{advice}")


def run(command: list[str]) -> None:
    """Run quietly; print all output on failure."""
    options = {"cwd": ROOT, "env": environment(), "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(command)}")


def environment() -> dict[str, str]:
    """With the interpreter's own bin folder first, which has PyPI's cmake and ninja."""
    folder = str(Path(sys.executable).parent)
    return os.environ | {"PATH": folder + os.pathsep + os.environ.get("PATH", "")}


def has(module: str) -> bool:
    # By path only: a finder of setuptools interprets a search for pip as pip running, and disables distutils.
    return PathFinder.find_spec(module) is not None


def install_editable() -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    run([*pip, "--no-build-isolation", "--no-deps", "--no-index", "-e", "."])
    # The redirect of an editable install and a module in the source tree must not conflict.
    for suffix in EXTENSION_SUFFIXES:  # only of this interpreter: another one's module is nowhere else
        (ROOT / "qflash" / f"_native{suffix}").unlink(missing_ok=True)


def pybind11_prefix(folder: Path) -> Path | None:
    """Where CMake finds pybind11: its own package, or a stand-in for the headers that PyTorch includes."""
    if has("pybind11"):
        import pybind11

        return Path(pybind11.get_cmake_dir())
    if not has("torch"):
        return None
    include = Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / "include"
    if not (include / "pybind11" / "pybind11.h").exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pybind11Config.cmake").write_text(TORCH_PYBIND11.format(include=include))
    return folder


TORCH_PYBIND11 = """\
function(pybind11_add_module name)
  Python_add_library(${{name}} MODULE WITH_SOABI ${{ARGN}})
  target_include_directories(${{name}} SYSTEM PRIVATE "{include}")
endfunction()
"""


def build_in_place() -> None:
    folder = ROOT / "build" / f"inplace-{sys.implementation.cache_tag}"
    cmake = shutil.which("cmake", path=environment()["PATH"])
    prefix = pybind11_prefix(folder / "pybind11")
    missing = [name for name, found in (("cmake", cmake), ("pybind11", prefix)) if not found]
    if missing:
        sys.exit(
            f"cannot build qflash: {sys.executable} lacks scikit-build-core, and {', '.join(missing)} is missing too.\n"
            "Install scikit-build-core, pybind11, cmake and ninja, or run make without VENV= to set up an environment."
        )
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environment()["PATH"]) else []
    options = ["-DQF_INPLACE=ON", f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_PREFIX_PATH={prefix}"]
    run([cmake, "-S", str(ROOT), "-B", str(folder), *generator, *options])
    run([cmake, "--build", str(folder), "--parallel"])


def main() -> None:
    reason = outdated()
    if reason is None:
        return
    print(f"Building qflash's native module ({reason})", flush=True)
    build()
    still = outdated()
    if still is not None:
        give_up(still)


if __name__ == "__main__":
    main()
