"""bench.models: rows of a tiny model on the CPU, which commands measure which part, and the table."""

import pytest

pytest.importorskip("transformers")

from qflash.cli.bench import load

models, store = load("models"), load("rows")

ABOUT = {"cpu": "A Processor", "isa": "avx2", "threads": 2, "gpu": None, "driver": None, "commit": "abc"}
ABOUT |= {"versions": {"torch": "2"}}


def tiny(*contenders, **words):
    contenders = contenders or tuple(models.CONTENDERS)
    words = {"new_tokens": 5, "runs": 1} | words
    return models.Run("cpu", ["tiny"], [models.Point(2, 20)], contenders, **words)


def test_every_contender_has_a_row(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "compile", lambda function, **words: function)  # which takes seconds, and a C compiler
    rows = list(models.measure(tiny()))
    assert [row["candidate"] for row in rows] == [one.name for one in models.CONTENDERS.values()]
    by_name = {row["candidate"]: row for row in rows}
    for row in rows:
        assert "skipped" not in row and row["rel_l2"] < 3e-2, row
        assert row["decode_tokens_s"] > 0 and row["first_ms"] > 0 and (row["B"], row["prompt"]) == (2, 20)
        assert row["captured"] is (None if row["candidate"] == "HF default" else False)  # nothing is, on a CPU
    assert by_name["qflash, INT8 KV"]["cache_bytes"] < 0.4 * by_name["qflash"]["cache_bytes"]
    assert by_name["qflash, INT8 linear"]["weight_bytes"] < 0.6 * by_name["qflash"]["weight_bytes"]
    assert by_name["qflash, joined"]["weight_bytes"] == by_name["qflash"]["weight_bytes"]


def test_rates():
    found = models.rates(4, 11, [1.0, 2.0, 1.0], [3.0, 6.0, 3.0])
    assert found == {"first_ms": 1000.0, "decode_tokens_s": 20.0, "tokens_s": 14.67, "runs": 3}


def test_what_has_a_row_is_left_out_and_time_ends_a_command():
    run = tiny("qflash", "qflash-kv8", "qflash-int8")
    run.done = {("tiny", 2, 20, "qflash"), ("tiny", 2, 20, "qflash, INT8 linear")}
    assert [row["candidate"] for row in models.measure(run)] == ["qflash, INT8 KV"]
    told = []
    assert list(models.measure(tiny(limit=-1.0), told.append)) == []
    assert told[0].startswith(f"{len(models.CONTENDERS)} not begun after -1 s, the first: tiny")


def test_prompts_longer_than_a_model_are_told():
    told, run = [], tiny()
    run.points = [models.Point(1, 256)]
    assert list(models.measure(run, told.append)) == []
    assert told == ["tiny, Point(batch=1, prompt=256): skipped, the model has 256 positions"]
    run = tiny("hf", "qflash", new_tokens=100)
    run.points = [models.Point(1, 250)]  # six positions are left
    assert [row["new_tokens"] for row in models.measure(run)] == [6, 6]


def test_a_contender_that_fails_stops_nobody(monkeypatch, capsys):
    def failing(model, ids, count):
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

    broken = models.Contender("hf", "HF default", failing, pages=False)
    monkeypatch.setitem(models.CONTENDERS, "hf", broken)
    first, second = models.measure(tiny("hf", "qflash"))
    assert first["skipped"] == "out of memory" and second["rel_l2"] < 1e-5
    monkeypatch.setattr(models, "_reference", lambda model, ids: 1.0 + 0 * ids[:2, :1])
    assert next(iter(models.measure(tiny("qflash"))))["skipped"].startswith("its first logits are off by")


def test_a_model_without_layers_to_join(monkeypatch):
    monkeypatch.setattr(models.model_contenders, "changed", lambda model, change: change != "joined")
    (only,) = models.measure(tiny("qflash-joined"))
    assert only["skipped"] == "the model has no layers to join"


def test_command_line():
    run, missing = models.parse(["cuda", "--models", "llama-1b", "--batches", "1,8", "--prompts", "900", "--missing"])
    assert missing and run.models == ["llama-1b"] and run.new_tokens == 128
    assert run.points == [models.Point(1, 900), models.Point(8, 900)] and run.contenders == list(models.CONTENDERS)
    run, missing = models.parse(["cuda", "--quick", "--contenders", "hf,qflash"])
    assert (run.new_tokens, run.runs, run.points, missing) == (32, 1, [models.Point(1, 900)], False)
    with pytest.raises(SystemExit):
        models.parse(["--contenders", "vllm"])


@pytest.mark.parametrize(
    "words", [["--batches", "0"], ["--prompts", "9,x"], ["--new-tokens", "0"], ["--seconds", "-1"]]
)
def test_numbers_that_measure_nothing(words, capsys):
    with pytest.raises(SystemExit):
        models.parse(words)
    assert f"argument {words[0]}: " in (said := capsys.readouterr().err) and "is not allowed: " in said


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(store.machine, "gpus", lambda: ((), "nvidia-smi is not on the PATH"))
    with pytest.raises(SystemExit, match="device is 'cuda' and nvidia-smi is not on the PATH; allowed: 'cpu', or"):
        store.folder_name("cuda")


@pytest.mark.parametrize("name", ["gpt2", "llama-1b", "llama-8b"])
def test_shapes(name):
    """The parameters that these models have, to a percent."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load("model_shapes").SHAPES[name].make_config())
    count = sum(x.numel() for x in model.parameters())
    assert count == pytest.approx({"gpt2": 124.4e6, "llama-1b": 1.236e9, "llama-8b": 8.03e9}[name], rel=1e-2)


def row(candidate, speed, **more):
    made = {"model": "llama-1b", "B": 1, "prompt": 900, "candidate": candidate, "kind": "models"}
    figures = {"first_ms": 10.0, "decode_tokens_s": speed, "tokens_s": speed, "peak_bytes": None}
    return ABOUT | made | figures | {"weight_bytes": 2_000_000_000, "cache_bytes": 1_000_000_000} | more


def test_parts_are_put_together():
    old = [row("qflash", 300.0), row("HF default", 80.0)]
    found = models.merged(old, [row("qflash", 600.0), row("qflash", 500.0, B=8)])
    shown = [(one["B"], one["candidate"], one["decode_tokens_s"]) for one in found]
    assert shown == [(1, "HF default", 80.0), (1, "qflash", 600.0), (8, "qflash", 500.0)]


def test_a_table_has_a_line_for_each_contender(tmp_path, monkeypatch):
    skipped = row("HF static, compiled", 0.0, skipped="out of memory", prompt=16000)
    rows = [row("HF default", 80.0), row("HF static, compiled", 400.0), row("qflash", 600.0), skipped]
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    store.write(tmp_path / "m-2c" / "models.jsonl", rows)
    text = models.table()
    assert "| llama-1b, 1 × 900 | HF default | 10.0 ms | 80 | 80 |  | 0.20× |  | 2.00 GB | 1.00 GB |" in text
    assert "| **qflash** | 10.0 ms | 600 | 600 | 7.50× | 1.50× |" in text
    assert "| llama-1b, 1 × 16000 | HF static, compiled | out of memory |" in text
