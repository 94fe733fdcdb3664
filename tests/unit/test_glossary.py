"""docs/glossary.md gives each word one meaning. Words that had several, or that were ours alone, stay retired: no
identifier in the sources has one of them as a part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".pyi", ".h", ".cc", ".inl", ".cu", ".cuh"}
# A word that no identifier may have as a part, the folders it is retired in, and what to write in its place.
RETIRED = {
    "wild": (("qflash", "bench", "tests"), "nonfinite"),
    "lift": (("qflash", "bench", "tests"), "exponent (of V), q_dot_mean or row bias"),
    "foresee": (("qflash", "bench", "tests"), "prefetch"),
    "turned": (("qflash", "bench", "tests"), "rotated, transposed"),
    "turn": (("qflash/csrc/attn", "qflash/csrc/quant", "qflash/csrc/kernels", "qflash/csrc/reduce"), "rotate"),
    "item": (
        ("qflash/csrc/attn", "qflash/csrc/quant", "qflash/csrc/kernels", "qflash/csrc/reduce", "qflash/csrc/hopper"),
        "work tile",
    ),
    "items": (
        ("qflash/csrc/attn", "qflash/csrc/cpu", "qflash/csrc/kernels", "qflash/csrc/reduce"),
        "work tiles, tasks",
    ),
    "draw": (("qflash/csrc/attn", "qflash/csrc/hopper"), "take (of a dynamic schedule)"),
    "plan": (("qflash/csrc/attn", "qflash/csrc/cpu", "qflash/csrc/hopper", "qflash/csrc/kernels"), "Plan is Python's"),
    "staged": (("qflash", "tests"), "stage is a slot of a ring; held (in registers), relayout"),
    "staging": (("qflash", "tests"), "stage is a slot of a ring; held (in registers), relayout"),
    "records": (("qflash",), "tuples; to record is to write into a trace"),
}


def parts_of(identifier: str) -> list[str]:
    """snake_case, kCamelCase and CAPITALS as lower-case words."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def identifiers(path: Path) -> set[str]:
    """Those of the code; comments, docstrings and texts are prose."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        text = re.sub(r'"""(?s:.*?)"""|#[^\n]*', "", text)
    else:
        text = re.sub(r"//[^\n]*|/\*(?s:.*?)\*/", "", text)
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"', "", text)
    return set(re.findall(r"[A-Za-z_]\w*", text))


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_in_no_identifier(word):
    folders, instead = RETIRED[word]
    sources = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    assert sources
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        for name in sorted(identifiers(path))
        if word in parts_of(name)
    ]
    assert not found, f"{word!r} is retired; docs/glossary.md has: {instead}\n" + "\n".join(found)


def test_identifiers_are_told_apart():
    assert parts_of("kWildBytes") == ["k", "wild", "bytes"] and parts_of("any_wild_") == ["any", "wild"]
    assert parts_of("return_lse") == ["return", "lse"] and parts_of("QF_PER_GROUP") == ["qf", "per", "group"]


def test_the_glossary_has_each_word_once():
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    words = [word.strip(" `*") for row in rows for word in row.split(",")]
    assert len(words) > 30 and len(words) == len(set(words))
