"""What is measured of the quantized kernels of Hopper: accuracy rows, the FP8 peer, tables and plots made from rows."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash.cli.bench import load
from qflash.ops.kv import results_of
from qflash.testing import errors, expected

torch = pytest.importorskip("torch")

accuracy, attention, peers, plot, report, rows, run = (
    load(name) for name in ("int8_accuracy", "attention", "peers", "plot", "report", "rows", "run")
)
quantize = load("sm90_quantize")
SIZES = results_of(1, 96, 2, 32, "int8")
SMALL = accuracy._problems(length=96, heads=2, longest=160, head_dim=32)


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    return tmp_path


def test_the_inputs_are_those_of_the_field():
    found = [(one.name, one.case.k_len, one.case.q_heads, one.case.causal) for one in accuracy.PROBLEMS]
    assert found[:8:2] == [(name, 4096, 8, False) for name in ("normal", "biased_k", "biased_v", "outlier")]
    assert found[8:] == [(name, 32768, 2, causal) for name in ("long", "long_biased_v") for causal in (False, True)]
    assert {(one.case.head_dim, one.case.dtype, one.case.batch) for one in accuracy.PROBLEMS} == {(128, "bfloat16", 1)}
    biased = next(one.case for one in SMALL if one.name == "biased_k")
    np.testing.assert_array_equal(peers.Arrays(biased, "cpu").numpy[1], biased.make_inputs().k)


@pytest.mark.parametrize("problem", SMALL, ids=lambda one: f"{one.name}-{one.case.causal}")
def test_the_truth_is_the_oracles(problem, monkeypatch):
    monkeypatch.setattr(accuracy, "_BLOCK", 1000)  # several blocks of rows
    got = accuracy.exact(peers.Arrays(problem.case, "cpu"))
    assert errors(got.numpy(), expected(problem.case).out).relative_l2 < 1e-12


def test_metrics():
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = accuracy.metrics(torch.tensor([3.0, 3.0]), want)
    assert found == {"cosine": 0.989949, "rel_l1": 0.143, "rel_l2": 0.2, "rmse": 0.707, "max": 1.0}
    theirs = errors(np.array([3.0, 3.0]), want.numpy())
    assert (theirs.relative_l2, theirs.max_abs) == (found["rel_l2"], found["max"])


def test_one_scale_for_a_tensor_is_what_outliers_spoil():
    found = {}
    for one in SMALL:
        arrays = peers.Arrays(one.case, "cpu")
        found[one.name, one.case.causal] = accuracy.metrics(accuracy.per_tensor_fp8(arrays), accuracy.exact(arrays))
    assert 0.02 < found["normal", False]["rel_l2"] < 0.1
    assert found["biased_k", False]["rel_l2"] > found["normal", False]["rel_l2"]


def test_rows_their_table_and_plot(results, tmp_path, monkeypatch):
    assert "No rows are committed yet" in accuracy.table() and "No rows are committed yet" in accuracy.summary()
    for module in peers.FA3_MODULES:
        monkeypatch.setitem(sys.modules, module, None)
    told = []
    suite = accuracy.Accuracy("cpu", SMALL[:4], ("cpu", "cpu_int8"))
    found = [row for part in run.measure(suite, on_skip=told.append) for row in part]
    assert len(found) == 12 and [text.split(": ")[0] for text in told] == ["FlashAttention 3", "FlashAttention 3 FP8"]
    by_name = {row["candidate"]: row for row in found[:3]}
    assert by_name["qflash cpu"]["rel_l2"] < 4e-3 < by_name["qflash cpu_int8"]["rel_l2"] < 0.02
    assert all(set(accuracy.METRICS) <= set(row) and row["kind"] == "accuracy" for row in found)
    rows.write(results / "machine" / f"{accuracy.NAME}.jsonl", found)
    table = accuracy.table()
    assert "| normal, T=96 H=2 D=32 full | **qflash cpu** | 1.0000" in table
    assert f"|  | {accuracy.PER_TENSOR} | 0.99" in table
    summary = accuracy.summary()
    assert f"| input | qflash cpu | qflash cpu_int8 | {accuracy.PER_TENSOR} |" in summary
    assert f"| normal, T=96 full | {by_name['qflash cpu']['rel_l2']:.2g} |" in summary
    pictures = plot.draw_from(results / "machine" / f"{accuracy.NAME}.jsonl")  # none where matplotlib is not installed
    assert all("relative L2 error" in picture.read_text() for picture in pictures)


def test_fa3_gets_e4m3_and_its_scales(monkeypatch):
    seen = []

    def attend(q, k, v, causal, **scales):
        seen.append((q, k, v, causal, scales))
        return q.to(torch.bfloat16)

    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", types.SimpleNamespace(flash_attn_func=attend))
    case = replace(SMALL[0].case, q_heads=4, batch=3)
    arrays = peers.Arrays(case, "cpu")
    assert peers.flash_attn_3_fp8().make(arrays)().shape == (3, 96, 4, 32)
    q, k, v, causal, scales = seen[0]
    assert causal is False and {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn}
    for x, given, name in zip((q, k, v), arrays.torch, "qkv", strict=True):
        scale = scales[f"{name}_descale"]
        assert scale.shape == (3, 2) and scale.dtype == torch.float32  # one for each key head
        back = x.float().unflatten(2, (2, -1)) * scale[:, None, :, None, None]
        assert errors(back.flatten(2, 3).numpy(), given.float().numpy()).relative_l2 < 0.04
        assert x.float().abs().max() == 448
    with pytest.raises(peers.Unavailable, match="takes no float32"):
        peers.flash_attn_3_fp8().make(peers.Arrays(replace(case, dtype="float32"), "cpu"))


def test_fp8_is_a_peer_where_it_is_asked_for():
    preset = load("presets").PRESETS["sm90"]
    assert "FlashAttention 3 FP8" in attention.OVER
    assert report.FP8 not in [one.name for one in peers.peers(replace(preset, peers=None))]
    assert [one.name for one in peers.peers(replace(preset, peers=(report.FP8,)))] == [report.FP8]


def test_who_takes_part():
    preset = load("presets").PRESETS["sm90_int8"]
    names = [one.name for one in peers.candidates(preset)]
    for kernel in ("sm90_int8", "sm90_int8_fp8"):
        ours = [f"qflash {kernel}{more}" for more in ("", " (kv ready)", " (kernel alone)")]
        assert [name for name in names if name in ours] == ours
    assert names[6:] == ["qflash sm90_fwd", "torch FA2", "torch SDPA cudnn", "FlashAttention 3", report.FP8]
    assert {(case.head_dim, case.q_len) for case in preset.cases} == {
        (d, t) for d in (64, 128, 256) for t in (512, 1024, 2048, 4096, 8192, 16384)
    }
    assert all(case.batch * case.q_len == 16384 and case.q_heads * case.head_dim == 2048 for case in preset.cases)


def test_the_kernel_alone_is_called_without_a_q(monkeypatch):
    """As prepared for the GPU, with a kernel that notes what it is given."""
    from qflash.call.prepare import Prepared
    from qflash.frontends.torch import launch
    from qflash.frontends.torch.arrays import described

    calls = []

    def find_ready(op, arrays, words):
        plan = op.plan(*described(op, arrays), *words)
        return types.SimpleNamespace(prepared=Prepared(plan, None, lambda *numbers: calls.append(numbers), 64))

    made = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in SIZES.items()}
    kv = qflash.QuantizedKV(**made, v=torch.zeros(1, 96, 2, 32, dtype=torch.bfloat16), dtype="bfloat16")
    monkeypatch.setattr(launch, "find_ready", find_ready)
    monkeypatch.setattr(qflash, "quantize_kv", lambda k, v, precision: kv)
    stream = types.SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    arrays = peers.Arrays(SMALL[0].case, "cpu")
    call = peers.qflash_alone("sm90_int8_kv").make(arrays)
    assert call().shape == (1, 96, 2, 32)
    with_q, without = calls
    assert with_q[0] == arrays.torch[0].data_ptr() and without[0] == 0
    assert with_q[1:] == without[1:] and without[-2:] == (77, 0) and 0 not in without[1:-1]


def quantized_rows(length: int) -> list[dict]:
    """Rows as a run on an H200 would write them."""
    machine = {"preset": "sm90_int8", "machine": "nvidia-h200", "gpu": "NVIDIA H200", "driver": "580", "commit": "abc"}
    problem = {"kind": "forward", "B": 4, "Tq": length, "Tk": length, "Hq": 16, "Hkv": 16, "D": 128}
    shared = machine | problem | {"versions": {"torch": "2.11"}, "causal": True, "dtype": "bfloat16"}

    def row(candidate, us, **speedup):
        names = {"cudnn": "torch SDPA cudnn", "fa3": "FlashAttention 3", "fp8": report.FP8, "ours": "qflash sm90_fwd"}
        kernel = "sm90_int8" if candidate.startswith("qflash") else None
        speedup = {names[name]: value for name, value in speedup.items()}
        more = {"candidate": candidate, "kernel": kernel, "us": {"p50": us}, "rel_l2": 0.01, "gflops": 1e6}
        return shared | more | {"speedup": speedup}

    return [
        row("qflash sm90_int8", 100.0, cudnn=1.3, fa3=1.2, fp8=0.9, ours=1.25),
        row("qflash sm90_int8 (kernel alone)", 90.0, cudnn=1.4, fa3=1.3, fp8=1.0, ours=1.3),
        row("FlashAttention 3", 120.0, cudnn=1.1),
        row(report.FP8, 90.0, cudnn=1.4),
    ]


def test_quantized_kernels_are_held_against_16_bits_and_against_fp8(results):
    assert "`qflash bench sm90_int8` makes them" in report.quantized_table()
    found = quantized_rows(4096) + quantized_rows(2048)
    assert report.best_peer(found[0]) == ("FlashAttention 3", 1.2)
    rows.write(results / "nvidia-h200" / "sm90_int8.jsonl", found)
    table = report.quantized_table()
    said = "| qflash sm90_int8 | **1.20** (1.20–1.20) | **0.90** (0.90–0.90) |"
    assert "| T ≥ 4096 | D=128, × 16 bits | D=128, × FP8 |" in report.quantized_summaries()
    assert said in report.quantized_summaries() and "<details>" not in report.quantized_summaries()
    assert said in table and "<details><summary>head dim 128, causal, bfloat16</summary>" in table
    cells = ("(4, 16, 4096, 128)", "**qflash sm90_int8**", "100.0 µs", "1000.0 TFLOP/s", "1e-02")
    assert f"| {' | '.join(cells)} | 1.20× FlashAttention 3 | 0.90× |" in table
    assert f"|  | {report.FP8} | 90.0 µs | 1000.0 TFLOP/s | 1e-02 |  |  |" in table


def test_bytes_of_the_pass():
    for problem in quantize.PROBLEMS:
        batch, length, heads, head_dim = problem.shape
        assert heads * head_dim == 2048 and batch * length == 16384
        arrays = 2 if problem.precision == "int8_fp8" else 1  # in 16 bits, and out in 8
        assert quantize.bytes_of(problem) == 3 * 16384 * 2048 * arrays
    assert {problem.precision for problem in quantize.PROBLEMS} == {"int8", "int8_fp8"}


def test_the_table_of_the_pass(results):
    assert "`python -m bench.sm90_quantize` makes them" in report.SECTIONS["sm90_quantize"]()
    row = quantized_rows(4096)[0] | {"what": "k, int8", "shape": [4, 4096, 16, 128], "gbps": 3500.4}
    row |= {"candidate": "qflash quantize_kv", "speedup": {"copy": 0.83}}
    rows.write(results / "nvidia-h200" / "sm90_quantize.jsonl", [row])
    assert (
        "| k, int8 | 4 × 4096 × 16 × 128 | bfloat16 | 100.0 µs | 3500 GB/s | 0.83× |"
        in report.SECTIONS["sm90_quantize"]()
    )
