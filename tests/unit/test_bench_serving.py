"""bench.serving: rows of a tiny model on the CPU, and the table."""

import pytest

pytest.importorskip("transformers")

from qflash.cli.bench import load

run, serving = load("run"), load("serving")


@pytest.fixture
def suite():
    made = serving.Serving("cpu")
    made.cases = (serving.Problem("tiny", 5, 2, 10, 4),)
    return made


def test_every_way_to_serve_has_a_row(suite, monkeypatch):
    (found,) = run.measure(suite, budget=0.01, min_rounds=2)
    assert [row["candidate"] for row in found] == [serving.SINGLE, serving.PADDED, serving.BATCHER]
    for row in found:
        assert row["other_tokens"] == 0 and row["tokens_s"] > 0 and row["requests"] == 5
        assert row["tokens_s"] == pytest.approx(row["new_tokens"] / row["us"]["p50"] * 1e6, rel=1e-2)
    assert set(found[-1]["speedup"]) == {serving.SINGLE, serving.PADDED} and found[-1]["captured"] is False
    monkeypatch.setattr(serving.tables.store, "committed", lambda preset, machine: {"a machine": found})
    assert f"| tiny, 5 requests, 2 at a time | {serving.SINGLE} |" in serving.table()


def test_tokens_of_others_are_told(suite):
    work = suite.arrays(suite.cases[0])
    single, _, batcher = suite.candidates(work)
    found = single.make(work)()
    assert suite.check(work, single, None, found) == 0
    found = [list(tokens) for tokens in found]
    found[0][0] += 1
    with pytest.raises(SystemExit, match=r"Batcher: .* of the tokens are not those of each prompt alone"):
        suite.check(work, batcher, None, found)
