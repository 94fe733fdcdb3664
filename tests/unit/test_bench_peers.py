"""bench.peers, presets and overhead: who takes part where, and rows of the presets whose machine is not this one."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import machine
from qflash.cli.bench import load
from qflash.testing import Case
from qflash.testing.timing import WallClock

attention, overhead, peers, presets, run = (load(name) for name in ("attention", "overhead", "peers", "presets", "run"))
PRESETS = presets.PRESETS
TINY = presets._square(48, 16, causal=True, heads=2)


def here(name: str, **changes):
    """A preset of the GPU on the CPU, with its kernel."""
    return replace(PRESETS[name], device="cpu", kernels=("cpu",), **changes)


def rows_of(preset, case=TINY, on_skip=lambda text: None):
    (found,) = run.measure(attention.suite_of(preset), cases=(case,), budget=0, min_rounds=2, on_skip=on_skip)
    return {row["candidate"]: row for row in found}


def columns(name):
    """Those of the committed rows of a preset."""
    return {tuple(row) for found in load("rows").committed(name).values() for row in found}


@pytest.mark.parametrize(("name", "case"), [("cpu", TINY), ("cpu-train", TINY), ("cpu-decode", replace(TINY, q_len=1))])
def test_rows_have_the_committed_columns(name, case):
    pytest.importorskip("torch")
    assert {tuple(row) for row in rows_of(PRESETS[name], case).values()} == columns(name)


def test_the_grid_on_hopper():
    preset = PRESETS["sm90"]
    grid = {
        (d, causal, t) for d in (64, 128, 256) for causal in (False, True) for t in (512, 1024, 2048, 4096, 8192, 16384)
    }
    bf16 = [case for case in preset.cases if case.dtype == "bfloat16"]
    assert {(case.head_dim, case.causal, case.q_len) for case in bf16} == grid and len(bf16) == 36
    assert [case.dtype for case in preset.cases[36:]] == ["float16"] * 6
    for case in preset.cases:
        assert case.batch * case.q_len == 16384 and case.q_heads * case.head_dim == 2048
    names = [one.name for one in peers.candidates(preset)]
    assert names == [f"qflash {presets.HOPPER}", "torch FA2", "torch SDPA cudnn", "FlashAttention 3"]
    assert set(names) <= set(attention.OVER)  # or the best peer would not be known


def test_the_backward_pass_alone():
    """On the CPU, where torch has FlashAttention, too: everyone's dq is right, and five products are counted."""
    pytest.importorskip("torch")
    preset = replace(PRESETS["backward"], device="cpu", kernels=("cpu_bwd",), best=False)
    found = rows_of(preset)
    assert list(found) == ["qflash cpu_bwd", "torch FA2"]
    for row in found.values():
        assert row["rel_l2"] < 1e-6 and row["kind"] == "backward"
        assert row["gflops"] == pytest.approx(2.5 * 2 * 2 * 48 * 48 * 16 / row["us"]["p50"] / 1e3, rel=0.1, abs=0.1)
    assert len(PRESETS["backward"].cases) == 12
    names = [one.name for one in peers.candidates(PRESETS["backward"])]
    assert names == ["qflash sm90_bwd", "qflash fa_mma_bwd", "torch FA2", "torch SDPA cudnn"]


def test_presets_name_peers_that_exist_and_ratios_that_are_taken():
    for preset in PRESETS.values():
        found = {one.name for one in peers.peers(preset)}
        assert preset.peers is None or set(preset.peers) == found
    assert [one.name for one in peers.candidates(PRESETS["sm90-jax"])] == [f"qflash {presets.HOPPER}", "jax.nn cudnn"]
    assert len(PRESETS["sm90-jax"].cases) == 8
    assert "jax.nn cudnn" in attention.OVER
    assert {case.q_len for case in PRESETS["sm90-rope"].cases} == {4096, 8192, 16384}


@pytest.mark.parametrize(
    "case", [TINY, Case(q_len=1, k_len=7, q_heads=4, kv_heads=2, head_dim=8, batch=3, dtype="bfloat16", seed=5)]
)
def test_numbers_are_the_cases_own(case):
    inputs = case.make_inputs()
    for drawn, want in zip(peers.Arrays(case, "cpu").numpy, (inputs.q, inputs.k, inputs.v), strict=True):
        assert drawn.dtype == want.dtype
        np.testing.assert_array_equal(drawn, want)


def fake_fa3(monkeypatch, function):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", types.SimpleNamespace(flash_attn_func=function))


def test_fa3_is_found_under_the_name_of_either_package(monkeypatch):
    torch = pytest.importorskip("torch")
    seen = []
    fake_fa3(monkeypatch, lambda q, k, v, causal: seen.append(causal) or (q, None))
    arrays = peers.Arrays(replace(TINY, dtype="bfloat16"), "cpu")
    assert peers.flash_attn_3().make(arrays)() is arrays.torch[0]
    assert seen == [True, True] and arrays.torch[0].dtype is torch.bfloat16
    with pytest.raises(peers.Unavailable, match="takes no float32"):
        peers.flash_attn_3().make(peers.Arrays(TINY, "cpu"))


def test_a_peer_that_refuses_a_problem_is_left_out(monkeypatch):
    def refuses(q, k, v, causal):
        raise RuntimeError("This flash attention build does not support FP16.\nmore")

    pytest.importorskip("torch")
    fake_fa3(monkeypatch, refuses)
    monkeypatch.setattr(peers, "peers", lambda preset: [peers.flash_attn_3()])
    told = []
    found = rows_of(here("sm90"), replace(TINY, dtype="float16"), told.append)
    assert list(found) == ["qflash cpu"]
    assert told == ["FlashAttention 3: This flash attention build does not support FP16."]


def test_neither_package_of_fa3_is_installed(monkeypatch):
    for module in ("flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(peers.Unavailable, match=r"flash_attn_interface cannot .*; fa3_fwd_interface cannot"):
        peers.flash_attn_3().make(peers.Arrays(TINY, "cpu"))


def test_rows_with_and_without_rope(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(attention, "OVER", ("qflash cpu",))
    found = rows_of(here("sm90-rope"))
    assert list(found) == ["qflash cpu", "qflash cpu, rope"]
    assert [row.get("rope") for row in found.values()] == [None, True]
    assert [list(row["speedup"]) for row in found.values()] == [[], ["qflash cpu"]]
    assert all(row["kernel"] == "cpu" and row["rel_l2"] < 1e-5 for row in found.values())


def test_rope_is_judged_by_the_rotated_truth():
    arrays = peers.Arrays(TINY, "cpu")
    assert (
        np.abs(attention.exact(TINY, arrays, "forward", True) - attention.exact(TINY, arrays, "forward")).max() > 0.01
    )


def test_rows_from_jax(monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(attention, "OVER", ("jax.nn xla",))
    told = []
    found = rows_of(here("sm90-jax", peers=("jax.nn cudnn", "jax.nn xla")), on_skip=told.append)
    assert list(found) == ["qflash cpu", "jax.nn xla"]
    assert [text.partition(":")[0] for text in told] == ["jax.nn cudnn"]
    for row in found.values():
        assert row["framework"] == "jax" and row["rel_l2"] < 1e-5 and row["us"]["n"] >= 2
        assert "peak_bytes" not in row
    assert found["qflash cpu"]["speedup"]["jax.nn xla"] > 0


def test_jax_calls_queue_up_and_the_last_is_waited_for(monkeypatch):
    jax = pytest.importorskip("jax")
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    clock, min_sample = attention.suite_of(PRESETS["sm90-jax"]).clock()
    clock.sample(iter(range(100)).__next__, 5)
    assert waited == [4] and min_sample > 0.01


def test_rows_of_tiny_calls():
    pytest.importorskip("torch")
    found = rows_of(PRESETS["cpu-overhead"], PRESETS["cpu-overhead"].cases[0])
    ours = found["qflash, PyTorch"]
    assert ours["kernel"] == "cpu" and ours["speedup"]["torch SDPA"] > 0 and ours["us"]["p50"] > 0
    assert found["torch SDPA"]["kernel"] is None and found["torch SDPA"]["speedup"] == {}
    assert found["the compiled call alone"]["us"]["min"] < ours["us"]["min"]
    assert {row["threads"] for row in found.values()} == {1} and {row["rel_l2"] for row in found.values()} == {None}
    assert {tuple(row) for row in found.values()} == columns("cpu-overhead")
    fronts = ["NumPy", "PyTorch", *(["JAX, jitted"] if machine.version("jax") else [])]
    assert found["qflash, PyTorch, PagedKV"]["kernel"] == "cpu"
    assert found["qflash, PyTorch, paged_write"]["kernel"] == "cpu_kv_write"
    assert {f"qflash, {front}{words}" for front in fronts for words in ("", ", kv_lens", ", rope")} <= set(found)


def test_tiny_calls_are_timed_on_one_thread(monkeypatch):
    """Threads are as they were afterwards, even where a call fails."""
    told = []
    monkeypatch.setattr(overhead, "set_threads", told.append)
    monkeypatch.setattr(qflash, "get_num_threads", lambda: 3)
    suite = overhead.Overhead(PRESETS["cpu-overhead"])
    with pytest.raises(ZeroDivisionError):
        suite.time({"fails": lambda: 1 / 0})
    assert told == [1, 3]


def fake_kv(monkeypatch, quantize_kv):
    """Ways of the GPU here, where `quantize_kv` and attention on what it gives are stand-ins."""
    for name in ("torch", "paged", "fa3"):
        monkeypatch.setattr(overhead, f"_{name}_ways", lambda arrays: iter(()))
    monkeypatch.setattr(qflash, "quantize_kv", quantize_kv)
    monkeypatch.setattr(qflash, "attention", lambda q, kv, kernel: (tuple(q.shape), kv))
    pytest.importorskip("torch")
    arrays = peers.Arrays(PRESETS["cuda-overhead"].cases[0], "cpu")
    assert len(arrays.torch) == 3  # made before the device is said to be another
    arrays.device = "cuda"
    return arrays


def test_calls_on_kept_keys_and_values(monkeypatch):
    made = []
    arrays = fake_kv(monkeypatch, lambda k, v, precision: made.append(precision) or precision)
    ways = list(overhead.ways(arrays))
    kernels = [("sm90_int8_kv", "int8"), ("sm90_int8_fp8_kv", "int8_fp8")]
    assert [(way.kernel, way.precision) for way in ways] == kernels
    assert {way.peer for way in ways} == {"torch SDPA"} and made == []
    for way in ways:
        call = way.make(arrays)
        assert call() == call() == ((1, 64, 2, 64), way.precision)
    assert made == ["int8", "int8_fp8"]  # once each, not with every call


def test_calls_on_kept_keys_and_values_are_left_out_by_name_before_hopper(monkeypatch):
    def refuses(k, v, precision):
        raise qflash.NoKernelError("no kernel serves this problem\nmore")

    arrays = fake_kv(monkeypatch, refuses)
    monkeypatch.setattr(overhead, "Arrays", lambda case, device: arrays)
    monkeypatch.setattr(load("rows"), "provenance", lambda device: {"threads": 2})
    monkeypatch.setattr(overhead.Overhead, "clock", lambda self: (WallClock(settle=0), 1e-4))
    plain = overhead.Way("torch SDPA", lambda arrays: lambda: None)
    monkeypatch.setattr(overhead, "_torch_ways", lambda arrays: iter([plain]))
    told = []
    assert list(rows_of(PRESETS["cuda-overhead"], PRESETS["cuda-overhead"].cases[0], told.append)) == ["torch SDPA"]
    assert told == [
        f"qflash, PyTorch, QuantizedKV of {precision}: no kernel serves this problem"
        for precision in ("int8", "int8_fp8")
    ]


def test_ways_on_the_gpu_are_those_of_torch(monkeypatch):
    seen = []
    for name in ("numpy", "torch", "paged", "torch_train", "jax", "kv", "fa3"):
        monkeypatch.setattr(overhead, f"_{name}_ways", lambda arrays, name=name: seen.append(name) or iter(()))
    assert list(overhead.ways(peers.Arrays(TINY, "cuda"))) == []
    assert seen == ["torch", "paged", "kv", "fa3"]


@pytest.mark.gpu
def test_rows_of_tiny_calls_on_the_gpu():
    pytest.importorskip("torch")
    found = rows_of(PRESETS["cuda-overhead"], PRESETS["cuda-overhead"].cases[0])
    kept = {row["kernel"] for row in found.values() if "QuantizedKV" in row["candidate"]}
    assert kept in ({"sm90_int8_kv", "sm90_int8_fp8_kv"}, set())  # on Hopper alone
    paged = {found[f"qflash, PyTorch, {name}"]["kernel"] for name in ("PagedKV", "paged_write")}
    assert "kv_write" in paged
    arrays = [row["kernel"] for name, row in found.items() if not ("Paged" in name or "paged" in name)]
    assert len(set(arrays) - kept - {None}) == 1 and found["torch SDPA"]["kernel"] is None
    assert found["the compiled call alone"]["us"]["min"] < found["qflash, PyTorch"]["us"]["min"]
