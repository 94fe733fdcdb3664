"""docs/learn.md: a section, a picture and a generated sentence for each rung; and what these sentences say."""

import re
from pathlib import Path

import pytest

from qflash.cli.bench import load
from qflash.dispatch import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "learn.md").read_text()
rungs, store, profiles = load("rungs"), load("rows"), load("profiles")


@pytest.mark.parametrize("name", rungs.BELOW)
def test_each_rung_has_its_section(name):
    assert name in BY_NAME
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", section)
    assert (ROOT / "docs" / picture).exists()
    assert f"<!-- qflash:rung-{name} -->" in section
    assert f"(kernels/{name}.md)" in section


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "img").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_have_a_dark_side_and_a_ground_of_their_own(path):
    text = path.read_text()
    assert "prefers-color-scheme: dark" in text
    assert '<rect class="bg"' in text
    assert "<title>" in text


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RESULTS", tmp_path / "rows")
    monkeypatch.setattr(profiles, "PROFILES", tmp_path / "profiles")
    case = rungs.CASE
    shared = {"gpu": "A GPU", "B": case.batch, "Tq": case.q_len, "D": case.head_dim, "causal": False}
    rows = [
        shared | {"candidate": "qflash unfused", "kernel": "unfused", "gflops": 13e3, "us": {"p50": 400.0}},
        shared | {"candidate": "qflash fa", "kernel": "fa", "gflops": 26e3, "us": {"p50": 200.0}},
        shared | {"candidate": "torch naive", "kernel": None, "gflops": 1e3, "us": {"p50": 5000.0}},
    ]
    store.write(tmp_path / "rows" / "gpu" / "ladder.jsonl", rows)
    return tmp_path


def test_a_rung_is_held_against_the_one_below(results):
    assert "| [fa](#fa) | 26.0 TFLOP/s | 2.00× unfused | – | – | – |" in rungs.table()
    assert "sm90_fwd" not in rungs.table()
    assert rungs.sentence("unfused").startswith("It reaches **13.0 TFLOP/s** (A GPU, ")
    assert "**26.0 TFLOP/s**, 2.00× the rate of `unfused`" in rungs.sentence("fa")
    assert rungs.sentence("fa_mma") == rungs.NONE


def test_the_longest_launch_speaks_for_a_rung(results):
    folder = results / "profiles" / "gpu"
    folder.mkdir(parents=True)

    def launch(ns, fma):
        return {profiles.DURATION: (ns, "ns"), profiles.FIGURES["FMA pipe"]: (fma, "%")}

    facts = {"problem": "p", "gpu": "A GPU", "driver": "1", "commit": "abc", "ncu": "1"}
    profiles.write(
        folder / "fa.csv", profiles.Profile(facts, {"short": launch(10.0, 11.0), "long": launch(99.0, 45.6)})
    )
    assert "FMA pipe 46 %, tensor pipe –" in rungs.sentence("fa")
