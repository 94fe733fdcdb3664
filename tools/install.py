"""Install this checkout into the running interpreter, unless what it imports is this checkout and newer than its C++.

With scikit-build-core and pip at hand that is `pip install --no-build-isolation --no-deps -e .`; on a machine that has
only CMake and pybind11 (or PyTorch, which carries its headers), the native module is built into the source tree.
Neither downloads anything.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPP = {".h", ".cc", ".cpp"}


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


def newest_source() -> float:
    sources = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    sources += [path for path in (ROOT / "qflash" / "csrc").rglob("*") if path.suffix in CPP]
    return max(path.stat().st_mtime for path in sources)


def outdated() -> str | None:
    """Why a build is needed, or None."""
    found = imported()
    if isinstance(found, str):
        return found
    package, native = found
    if package.resolve().parent != ROOT / "qflash":
        return f"the installed qflash is {package.parent}, not this checkout"
    if native.stat().st_mtime < newest_source():
        return "its C++ sources changed"
    return None


def run(command: list[str]) -> None:
    """Run quietly; show everything when it fails."""
    options = {"cwd": ROOT, "env": environment(), "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(command)}")


def environment() -> dict[str, str]:
    """The interpreter's own bin folder first: that is where PyPI's cmake and ninja are."""
    folder = str(Path(sys.executable).parent)
    return os.environ | {"PATH": folder + os.pathsep + os.environ.get("PATH", "")}


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def install_editable() -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    run([*pip, "--no-build-isolation", "--no-deps", "--no-index", "-e", "."])
    # The redirect of an editable install and a module in the source tree must not compete.
    for stale in (ROOT / "qflash").glob("_native*.so"):
        stale.unlink()


def pybind11_prefix(folder: Path) -> Path | None:
    """Where CMake finds pybind11: its own package, or a stand-in for the headers that PyTorch carries."""
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
    if has("scikit_build_core") and has("pybind11") and has("pip"):
        install_editable()
    else:
        build_in_place()
    still = outdated()
    if still is not None:
        sys.exit(f"qflash was built and still cannot be used: {still}")


if __name__ == "__main__":
    main()
