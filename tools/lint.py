"""Style and types: ruff and mypy on Python, clang-format on the C++ and CUDA files given.

All are pinned in pyproject.toml, because releases differ in what they consider formatted or correctly typed. A tool
that is missing, or of another release, is reported and skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pinned(tool: str) -> str:
    return re.search(rf'"{tool}==([\d.]+)"', (ROOT / "pyproject.toml").read_text()).group(1)


def find(tool: str) -> str | None:
    """The tool next to the interpreter or on the PATH, if it is the pinned release."""
    beside = Path(sys.executable).parent / tool
    path = str(beside) if beside.exists() else shutil.which(tool)
    if path is None:
        print(f"lint: {tool} is not installed, its checks are skipped")
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    if pinned(tool) not in text:
        print(f"lint: {tool} is {text.strip()!r}, not {pinned(tool)}; its checks are skipped")
        return None
    return path


def main(cpp_files: list[str]) -> int:
    checks = []
    ruff = find("ruff")
    if ruff:
        checks += [[ruff, "check", "--quiet", "."], [ruff, "format", "--check", "--quiet", "."]]
    mypy = find("mypy")
    if mypy:  # pyproject.toml specifies the files and the strictness
        checks.append([mypy, "--python-executable", sys.executable, "--no-error-summary"])
    clang_format = find("clang-format")
    if clang_format and cpp_files:
        checks.append([clang_format, "--dry-run", "-Werror", *cpp_files])
    failed = [check for check in checks if subprocess.run(check, cwd=ROOT).returncode]
    if failed:
        print("lint: failed; `make fmt` mends most of the style, types are mended by hand")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
