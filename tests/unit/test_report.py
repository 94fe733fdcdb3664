"""Rows and README sections."""

import json
import os
import socket
import sys
import types

import pytest

from qflash.cli.bench import load
from qflash.dispatch import KERNELS, VARIANTS

attention, report, store, presets, run, peers = (
    load(name) for name in ("attention", "report", "rows", "presets", "run", "peers")
)


def row(candidate, gflops, speedup, **changes):
    kernel = candidate.removeprefix("qflash ") if candidate.startswith("qflash") else None
    base = {"preset": "cpu", "machine": "m-2c", "cpu": "A Processor", "isa": "avx2", "threads": 2, "gpu": None}
    base |= {"driver": None, "commit": "abc", "versions": {"torch": "2.13.0"}, "kind": "forward", "B": 1, "Tq": 1024}
    base |= {"Tk": 1024, "Hq": 8, "Hkv": 8, "D": 64, "dtype": "float32", "causal": True, "candidate": candidate}
    base |= {"framework": "torch", "kernel": kernel, "precision": "native", "rel_l2": 3e-7, "gflops": gflops}
    return base | {"us": {"p50": 1234.5, "min": 1200.0}, "speedup": speedup} | changes


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    rows = [row("qflash cpu", 200.0, {"torch SDPA": 2.0}), row("torch SDPA", 100.0, {})]
    store.write(tmp_path / "m-2c" / "cpu.jsonl", rows)
    return tmp_path


def test_rows_survive_the_file(results):
    assert store.committed("cpu")["m-2c"][0]["gflops"] == 200.0
    assert len((results / "m-2c" / "cpu.jsonl").read_text().splitlines()) == 2


def test_a_table_shows_rate_ratio_error_and_source(results):
    table = report.preset_table("cpu")
    assert "A Processor (avx2, 2 threads); torch 2.13.0; commit abc." in table
    assert "| B=1 T=1024 H=8 D=64 causal float32 | 200 GFLOP/s | **2.00×** | 3e-07 | 100 GFLOP/s |" in table


def test_a_preset_without_rows_says_so(results):
    assert "No rows are committed yet" in report.preset_table("cuda")
    assert "`qflash bench ladder` makes them" in report.ladder_table()


def test_the_ladder_has_a_table_per_head_dim_and_mask(results):
    rungs = (("qflash unfused", {"torch naive": 0.5, "torch FA2": 0.05}), ("torch FA2", {"torch naive": 10.0}))
    shape = {"preset": "ladder", "B": 32, "Hq": 16, "Tq": 512, "dtype": "float16", "gpu": "NVIDIA H200"}
    rows = [
        row(name, 12e3, speedup, D=head_dim, causal=causal, **shape)
        for head_dim in (128, 64)
        for causal in (False, True)
        for name, speedup in rungs
    ]
    store.write(results / "nvidia-h200" / "ladder.jsonl", rows)
    table = report.ladder_table()
    assert table.count("| (B, H, T, D) |") == 4
    assert table.count("<details>") == 3
    assert "| (32, 16, 512, 128) | **qflash unfused** | 1.23 ms | 12.0 TFLOP/s | 3e-07 | 0.50× | 0.05× |" in table
    assert "|  | torch FA2 | 1.23 ms | 12.0 TFLOP/s | 3e-07 | 10.00× |  |" in table


def test_geometric_means():
    rows = [row("qflash fa", 1.0, {"torch FA2": value}) for value in (0.5, 2.0, 8.0)] + [row("torch FA2", 1.0, {})]
    assert report.geometric_means(rows) == ["qflash fa: 2.00× torch FA2 (geometric mean of 3 problems, 0.50 to 8.00)"]
    assert report.geometric_means(rows[:1]) == []


def test_the_best_peer_is_another_one_from_problem_to_problem(results):
    ratios = (
        {"torch FA2": 2.0, "torch SDPA cudnn": 1.0, "FlashAttention 3": 4.0, "qflash fa_mma": 0.1},
        {"torch FA2": 2.0, "torch SDPA cudnn": 1.5, "FlashAttention 3": 0.81},
    )
    assert [report.best_peer(row("qflash fa", 1.0, one)) for one in ratios] == [
        ("torch SDPA cudnn", 1.0),
        ("FlashAttention 3", 0.81),
    ]
    assert report.best_peer(row("qflash fa", 1.0, {"qflash fa_mma": 0.1})) is None
    rows = [row("qflash fa", 1.0, one, Tq=length) for length, one in enumerate(ratios)]
    rows += [row("qflash fa", 1.0, {"torch FA2": 3.0}, dtype="float16"), row("torch FA2", 1.0, {"FlashAttention 3": 1})]
    assert report.against_the_best(rows) == [
        "qflash fa, float32: 0.90× the best of torch FA2, torch SDPA cudnn, FlashAttention 3 "
        "(geometric mean of 2 problems, 0.81 to 1.00; 1 under 0.95×)",
        "qflash fa, float16: 3.00× the best of torch FA2 (geometric mean of 1 problems, 3.00 to 3.00; 0 under 0.95×)",
    ]
    store.write(results / "nvidia-h200" / "sm90.jsonl", rows)
    table = report.preset_table("sm90")
    assert "| problem | qflash fa | × best peer | error | torch FA2 |" in table
    assert "causal float32 | 1 GFLOP/s | **0.81×** FlashAttention 3 | 3e-07 | – |" in table
    assert "- qflash fa, float32: 0.90× the best of" in table


def test_rope_has_its_own_ratio_and_its_own_lines(results):
    (kernel,) = presets.PRESETS["sm90-rope"].kernels
    plain, rotated = f"qflash {kernel}", f"qflash {kernel}, rope"
    rows = []
    for length in (4096, 8192):
        rows += [row(plain, 1.0, {}, Tq=length), row(rotated, 1.0, {plain: 0.96}, Tq=length, rope=True, kernel=kernel)]
    store.write(results / "nvidia-h200" / "sm90-rope.jsonl", rows)
    table = report.preset_table("sm90-rope")
    assert f"- {rotated}: 0.96× {plain} (geometric mean of 2 problems, 0.96 to 0.96)" in table
    assert "| 1 GFLOP/s |  | 3e-07 | 1 GFLOP/s | **0.96×** | 3e-07 |" in table
    lines = report.kernel_table(kernel)
    assert "T=4096 H=8 D=64 causal | " in lines
    assert "T=4096 H=8 D=64 causal rope | " in lines


def test_the_ladder_names_its_shapes_rungs_and_peers():
    ladder = presets.PRESETS["ladder"]
    shapes = {(case.batch, case.q_heads, case.q_len, case.head_dim) for case in ladder.cases}
    assert {
        (32, 16, 512, 128),
        (8, 16, 2048, 128),
        (1, 16, 16384, 128),
        (32, 32, 512, 64),
        (1, 32, 16384, 64),
    } <= shapes
    assert len(ladder.cases) == 24
    assert list(ladder.kernels) == [*presets.LADDER, "fa_int8_quantized"]
    assert set(ladder.kernels) <= set(VARIANTS)
    chosen = peers.candidates(ladder)
    assert [one.name for one in chosen if one.kernel is None] == ["torch FA2", "torch SDPA cudnn", "torch naive"]


def test_peak_memory_is_the_calls_own(monkeypatch):
    case = presets._square(64, 32, causal=False, heads=2, dtype="float16")
    of_torch, of_jax = presets.PRESETS["sm90"], presets.PRESETS["sm90-jax"]
    assert attention.peak_memory(case, lambda: None, presets.PRESETS["cpu"]) == {}
    assert attention.peak_memory(case, lambda: None, of_jax) == {}
    names = ("synchronize", "reset_peak_memory_stats")
    fake = types.SimpleNamespace(**{name: lambda: None for name in names})
    fake.memory_allocated, fake.max_memory_allocated = lambda: 5000, lambda: 5000 + 700
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=fake))
    assert attention.peak_memory(case, lambda: None, of_torch) == {"peak_bytes": 3 * 64 * 2 * 32 * 2 + 700}


def test_rewrite_fills_sections_and_names_what_changed(results):
    text = "a\n<!-- qflash:cpu -->old<!-- /qflash:cpu -->\nb"
    fresh, changed = report.rewrite(text)
    assert changed == ["cpu"]
    assert fresh.startswith("a\n<!-- qflash:cpu -->\nA Processor")
    assert fresh.endswith("<!-- /qflash:cpu -->\nb")
    assert report.rewrite(fresh) == (fresh, [])


def test_an_unknown_section_is_refused():
    with pytest.raises(ValueError, match="nonsense"):
        report.rewrite("<!-- qflash:nonsense -->x<!-- /qflash:nonsense -->")


def test_every_kernel_is_in_one_table():
    attention, others = report.kernels_table(), report.operations_table()
    for kernel in KERNELS:
        tables = [table for table in (attention, others) if f"`{kernel.name}`" in table]
        assert tables == [attention if kernel.op.startswith("attention") else others]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "1.23 ms"), ({"us": {"p50": 7.25}}, "7.2 µs")],
)
def test_times_have_units(changes, expected):
    assert report.time(row("x", 1, {}, **changes)) == expected


def test_flop_counts_half_for_causal():
    case = presets.PRESETS["cpu"].cases[0]
    assert not case.causal
    full = store.flop(case, "forward")
    assert full == 4 * 8 * 1024 * 1024 * 64
    causal = next(c for c in presets.PRESETS["cpu"].cases if c.causal)
    assert store.flop(causal, "forward") == full / 2
    assert store.flop(case, "train") == 3.5 * full


def test_presets_name_kernels_of_their_device():
    devices = {name: variant.device for name, variant in VARIANTS.items()}
    for preset in presets.PRESETS.values():
        assert {devices[name] for name in preset.kernels} == {preset.device}


def test_measured_rows_are_complete_and_name_no_host(capsys):
    preset = presets.PRESETS["cpu"]
    case = presets._square(48, 16, causal=True, heads=2)
    (rows,) = run.measure(attention.suite_of(preset), cases=(case,), budget=0, min_rounds=2, on_skip=print)
    ours = [one for one in rows if one["kernel"]]
    assert [one["kernel"] for one in ours] == list(preset.kernels)
    for one in rows:
        assert one["us"]["n"] >= 2
        assert {"mean", "std", "min", "max", "p50", "p95", "p99"} <= set(one["us"])
        assert one["us"]["min"] <= one["us"]["p50"] <= one["us"]["max"]
        # p50 is stored rounded, so agreement is to its last digit
        assert one["gflops"] == pytest.approx(2 * 2 * 48 * 48 * 16 / one["us"]["p50"] / 1e3, abs=0.1, rel=0.01)
        assert one["rel_l2"] < (2e-2 if one["precision"] == "int8" else 1e-5)
        text = json.dumps(one)
        assert os.sep + "home" not in text
        assert socket.gethostname() not in text
