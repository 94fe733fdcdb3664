"""The number of source lines of a kernel: those with code, in its own files and in all that they include."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from bench.rows import ROOT
from qflash import dispatch

PACKAGE = ROOT / "qflash"
_SHARED_OF_TRITON = {"launches"}  # used by every Triton kernel, like csrc/common in CUDA: not counted


def lines_of(kernel: str) -> tuple[int, int]:
    """(its own, with all that it includes of the package): lines with more than a comment or a docstring."""
    row = dispatch.BY_NAME[kernel]
    if row.backend == "triton":
        own = PACKAGE / "triton" / f"{kernel}.py"
        return python_lines(own), sum(map(python_lines, imported(own)))
    folder = PACKAGE / "csrc" / "kernels" / row.op / kernel
    own = sum(c_lines(path) for path in sorted(folder.iterdir()))
    return own, sum(map(c_lines, included(folder / "launch.cu")))


def python_lines(path: Path) -> int:
    """Lines with code."""
    tree = ast.parse(path.read_text())
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and at not in docstrings for at, line in lines)


def c_lines(path: Path) -> int:
    """Lines with code."""
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), path.read_text(), flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in text.splitlines())


def imported(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """A Triton kernel's module and those of qflash/triton that it uses."""
    seen = set() if seen is None else seen
    seen.add(path)
    names = re.findall(r"^from qflash\.triton\.(\w+) import", path.read_text(), re.MULTILINE)
    for group in re.findall(r"^from qflash\.triton import (.+)$", path.read_text(), re.MULTILINE):
        names += re.findall(r"\w+", group)
    for name in (name for name in names if name not in _SHARED_OF_TRITON):
        if (other := path.with_name(f"{name}.py")) not in seen:
            imported(other, seen)
    return seen


def included(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """A CUDA kernel's source and the headers of csrc that it includes."""
    seen = set() if seen is None else seen
    seen.add(path)
    csrc = PACKAGE / "csrc"
    for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
        found = next((one for one in (csrc / name, csrc / "include" / name) if one.exists()), None)
        if found and found not in seen:
            included(found, seen)
    return seen
