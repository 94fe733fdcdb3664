"""Attention compared with its peers: the suite of a preset, with errors against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from bench import rows, tutorial
from bench.arrays import Arrays, Candidate
from bench.kv_write import KvWrite
from bench.mixed import MixedLengths
from bench.overhead import Overhead
from bench.paged import PagedArrays
from bench.peers import candidates
from bench.presets import BACKWARD, DECODE, FORWARD, MIXED, OVERHEAD, TRAIN, WRITE, Preset
from bench.run import Row, Suite
from qflash import reference
from qflash.testing import Case, errors
from qflash.testing.timing import Call, Clock, Comparison, WallClock

# Candidates that speed-ups are computed over, if they take part.
OVER = (
    "torch SDPA", "torch FA2", "torch naive", "qflash fa_mma",
    "torch SDPA cudnn", "FlashAttention 3", "FlashAttention 3 FP8", "jax.nn cudnn",
    "FlashAttention 3, pages of 256", "FlashAttention 3, pages of 16",
    "FlashInfer", "FlashInfer, pages of 256", "FlashInfer, pages of 16",
    "qflash sm90_fwd", "qflash sm90_decode", "qflash sm90_decode, pages of 256",
    "qflash cpu", "qflash cpu, pages of 256",
    "torch.compile", tutorial.NAME,
)  # fmt: skip
CHECKED_ROWS = 512


def suite_of(preset: Preset) -> Suite:
    """The suite that measures a preset."""
    others: dict[str, Callable[[Preset], Suite]] = {OVERHEAD: Overhead, MIXED: MixedLengths, WRITE: KvWrite}
    return others.get(preset.kind, Attention)(preset)


def exact(case: Case, arrays: Arrays, kind: str, rope: bool = False) -> np.ndarray:
    """The last rows of the first head of the first sequence in float64: out, or dq of a train step or a backward pass.

    Heads and query rows are independent, and the diagonal is aligned to the last row, so this part is itself a problem.
    """
    q, k, v = (x[:1, :, :1].astype(np.float64) for x in arrays.numpy)
    q = q[:, -CHECKED_ROWS:]
    if kind in (TRAIN, BACKWARD):
        dout = arrays.dout[:1, -CHECKED_ROWS:, :1].astype(np.float64)
        return reference.attention_backward(q, k, v, dout, causal=case.causal)[0]
    return reference.attention(q, k, v, causal=case.causal, rope=arrays.rope if rope else None)[0]


class CheckedArrays(Arrays):
    """A problem's arrays, and the expected values of part of its result."""

    def __init__(self, case: Case, device: str, kind: str):
        super().__init__(case, device)
        self.kind = kind

    @cached_property
    def truth(self) -> np.ndarray:
        return exact(self.case, self, self.kind)

    @cached_property
    def rotated_truth(self) -> np.ndarray:
        return exact(self.case, self, self.kind, rope=True)


class Attention(Suite):
    """Forward passes, backward passes, train steps or decode steps of a preset."""

    def __init__(self, preset: Preset):
        self.name, self.device, self.cases = preset.name, preset.device, preset.cases
        self.preset = preset
        self.over, self.graph = OVER, preset.graph
        self.says_left_out = tutorial.NAME in (preset.peers or ())
        self._candidates = candidates(preset)

    def arrays(self, case: Case) -> CheckedArrays | PagedArrays:
        if self.preset.page_sizes:
            return PagedArrays(case, self.device)
        return CheckedArrays(case, self.device, self.preset.kind)

    def candidates(self, arrays: Arrays) -> list[Candidate]:
        return self._candidates

    def problem(self, arrays: Arrays) -> Row:
        return rows.problem(arrays.case, self.preset.kind)

    def check(self, arrays: CheckedArrays | PagedArrays, candidate: Candidate, call: Call, result: Any) -> Row:
        truth = arrays.rotated_truth if candidate.rope else arrays.truth
        rel_l2 = errors(candidate.read(result)[:1, -CHECKED_ROWS:, :1], truth).relative_l2
        memory = peak_memory(arrays.case, call, self.preset, (candidate.int8_pages, candidate.int8_keys))
        return {"rel_l2": float(f"{rel_l2:.3g}")} | memory

    def row(self, arrays: Arrays, candidate: Candidate, checked: Row, timing: Comparison) -> Row:
        stats, kind, case = timing.stats[candidate.name], self.preset.kind, arrays.case
        row = {
            "candidate": candidate.name,
            "framework": candidate.framework,
            "kernel": candidate.kernel,
            "precision": candidate.precision,
            **({"rope": True} if candidate.rope else {}),
            "us": stats.as_dict(),
            **checked,
        }
        if kind in (FORWARD, BACKWARD, TRAIN):
            row["gflops"] = round(rows.flop(case, kind) / stats.p50 / 1e3, 1)
        if kind == DECODE:
            row["gbs"] = round(rows.cache_bytes(case, candidate.int8_pages, candidate.int8_keys) / stats.p50 / 1e3, 2)
        return row

    def clock(self) -> tuple[Clock, float]:
        if self.preset.framework == "jax":
            import jax

            # JAX hides its stream. Calls are queued and the last one is waited for, once per sample, which is much
            # longer than the wait.
            return WallClock(sync=jax.block_until_ready, settle=0), 0.02
        return super().clock()


def peak_memory(
    case: Case, call: Callable[[], Any], preset: Preset, int8: tuple[bool, bool] = (False, False)
) -> dict[str, int]:
    """Bytes of GPU memory that a call needs at its peak: q, k and v, its result, and what else torch allocates for it.
    int8: whether k and v are on INT8 pages, and whether only k is in INT8.

    No figure on the CPU: allocations are not counted per call there, and the process's high-water mark is not the
    call's. Nor for JAX, whose allocations torch does not track.
    """
    if preset.device != "cuda" or preset.framework != "torch":
        return {}
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return {"peak_bytes": rows.input_bytes(case, *int8) + torch.cuda.max_memory_allocated() - before}
