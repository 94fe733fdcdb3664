"""Make the virtual environment for `make`: the packages that pyproject.toml names, and a pinned torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# PyPI's torch for Linux includes gigabytes of CUDA libraries; this index has the same release without them.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def requirements(extras: list[str]) -> list[str]:
    """The requirements in pyproject.toml, with the optional parts `extras`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    unknown = sorted(set(extras) - set(optional))
    if unknown:
        sys.exit(f"EXTRAS has {', '.join(unknown)}; allowed: {', '.join(optional)}")
    return project["dependencies"] + [item for extra in extras for item in optional[extra]]


def reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", required=True, help="requirement of the torch to install, pinned")
    parser.add_argument("--extras", default="", help="comma-separated optional dependencies of pyproject.toml")
    parser.add_argument("--gpu", action="store_true", help="this machine has an NVIDIA GPU: install torch with CUDA")
    args = parser.parse_args()

    extras = [extra for extra in args.extras.split(",") if extra]
    packages = requirements(extras)
    if "torch" in extras:
        packages.append(args.torch)
    if args.gpu and "jax" in extras:
        packages.append("jax[cuda13]; sys_platform == 'linux'")
    python = args.folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    if sys.stdout.isatty():
        print(f"Setting up {args.folder} with {len(packages)} packages; a few minutes the first time", flush=True)
    else:
        print(f"Setting up {args.folder}: {' '.join(packages)}", flush=True)
        command += ["--progress-bar", "off", "--quiet"]
    if "torch" in extras and not args.gpu and sys.platform == "linux" and reachable(f"{CPU_INDEX}/torch/"):
        command += ["--extra-index-url", CPU_INDEX]
    if not python.exists():
        venv.create(args.folder, with_pip=True)
    failed = subprocess.run([*map(str, command), *packages], stdin=subprocess.DEVNULL).returncode
    if not failed:
        # Compile bytecode, which pip would do serially. Some packages' data includes files that no Python can read.
        subprocess.run([python, "-m", "compileall", "-qq", "-j", "0", args.folder / "lib"])
    sys.exit(failed)


if __name__ == "__main__":
    main()
