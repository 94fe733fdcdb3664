"""No file of tests/ imports another: what they share is in qflash/testing, or a fixture of a conftest.py."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
# As text, so that programs in strings, which tests start, count too.
IMPORTED = re.compile(r"(?:^|[;\"'])\s*(?:from\s+([\w.]+)\s+import|import\s+([\w.]+))", re.MULTILINE)


def imported(text: str) -> set[str]:
    return {(match[1] or match[2]).split(".")[0] for match in IMPORTED.finditer(text)}


def test_no_test_imports_a_test():
    names = {path.stem for path in FILES} | {"tests", *(path.name for path in TESTS.iterdir() if path.is_dir())}
    found = {path.relative_to(TESTS).as_posix(): imported(path.read_text()) & names for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_what_counts_as_an_import():
    lines = (
        "import {}, sys",
        "CODE = 'import {}; from {} import check'",
        "    from {}.unit import x",
        "important = {}",
    )
    names = ("os", "torch", "test_range", "tests", "nothing")
    assert imported("\n".join(lines).format(*names)) == {"os", "torch", "test_range", "tests"}
