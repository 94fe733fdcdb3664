"""What quantization does to the repository's trained model, held to bounds on text that it has not seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qflash.cli.bench import load

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
quality, modes, run, report = (load(name) for name in ("quality", "quality_modes", "run", "report"))

PROBLEM = quality.Problem(quality.SMALL, "float32", windows=20, length=512, prompts=4, prompt_length=64, new_tokens=16)
# By mode: the largest change of perplexity, and the least agreement with SDPA in float32.
BOUNDS = {
    "qf": (1e-5, 0.9999),
    "qf_int8": (3e-3, 0.99),
    "qf, INT8 pages": (3e-3, 0.99),
    "qf, INT8 linear": (1e-2, 0.98),
    "qf, INT8 pages and linear": (1e-2, 0.98),
}


@pytest.fixture(scope="module")
def rows():
    (found,) = run.measure(quality.Quality("cpu", [PROBLEM]))
    return {row["candidate"]: row for row in found}


def test_enough_text_is_read(rows):
    assert PROBLEM.windows * PROBLEM.length >= 10_000
    assert rows["sdpa"]["windows"] == PROBLEM.windows


def test_the_model_has_learned(rows):
    assert rows["sdpa"]["perplexity"] < 4.0  # of 256 bytes; a quantized model that knows nothing would lose nothing


@pytest.mark.parametrize("mode", BOUNDS)
def test_perplexity_and_first_choices(rows, mode):
    change, least = BOUNDS[mode]
    assert abs(rows[mode]["perplexity_ratio"] - 1) <= change
    assert rows[mode]["agreement"] >= least


def test_quantized_modes_are_quantized(rows):
    """Else bounds would be met for the wrong reason."""
    exact = rows["qf"]
    assert exact["attention_cosine"] > 0.9999999 and exact["mlp_cosine"] > 0.9999999
    for mode in ("qf_int8", "qf, INT8 pages", "qf, INT8 linear"):
        assert 0.999 < rows[mode]["attention_cosine"] < 0.99999
        assert rows[mode]["perplexity_ratio"] != exact["perplexity_ratio"]
    assert 0.999 < rows["qf, INT8 linear"]["mlp_cosine"] < 0.99999
    assert rows["qf_int8"]["mlp_cosine"] > 0.9999999


def test_a_mode_that_nothing_serves_is_told_and_left_out(rows):
    told = []
    problem = replace(PROBLEM, windows=1, length=64, prompts=1, prompt_length=32, new_tokens=2)
    suite = quality.Quality("cpu", [problem], modes=tuple(mode for mode in modes.MODES if "fp8" in mode.attention))
    assert list(run.measure(suite, on_skip=told.append)) == [[]]
    assert told == ["qf_int8_fp8: no kernel serves this problem"]
    assert "qf_int8_fp8" not in rows


def test_a_model_of_other_tokens_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint has 99 tokens; allowed: a model of 256, the bytes"):
        quality.Text(replace(PROBLEM, checkpoint=tmp_path), "cpu")


def test_a_text_is_compared_up_to_its_first_difference():
    got, want = torch.tensor([[1, 2, 3, 4], [5, 5, 5, 5]]), torch.tensor([[1, 9, 3, 4], [5, 5, 5, 5]])
    assert quality.same_beginning(got, want) == pytest.approx((0.25 + 1) / 2)
    assert quality.agreement(got, want) == pytest.approx(7 / 8)


def test_a_table_shows_every_mode(rows, tmp_path, monkeypatch):
    store = load("rows")
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    store.write(tmp_path / "m-2c" / "quality.jsonl", list(rows.values()))
    table = report.TABLES["quality"]()
    assert table.count("\n| ") == 2 + len(rows)  # beside the header and its rule
    change = 100 * (rows["qf_int8"]["perplexity_ratio"] - 1)
    assert f"|  | qf_int8 | {rows['qf_int8']['perplexity']:.4f} | {change:+.3f} % |" in table
