"""Measure a preset: every candidate on every problem, interleaved, with its error against float64.

python -m bench.run PRESET [PRESET ...]   writes bench/results/<machine>/<preset>.jsonl; `qflash bench` does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import qflash
from bench import rows
from bench.overhead import ways
from bench.peers import Arrays, Candidate, Unavailable, candidates
from bench.presets import DECODE, FORWARD, OVERHEAD, PRESETS, TRAIN, Preset
from qflash import machine, reference
from qflash.testing import Case, errors
from qflash.testing.timing import Clock, Comparison, CudaClock, HostClock, WallClock, compare

# Whom speed-ups are given over, where they take part.
OVER = (
    "torch SDPA", "torch FA2", "torch naive", "qflash fa_mma",
    "torch SDPA cudnn", "FlashAttention 3", "FlashAttention 3 FP8", "jax.nn cudnn",
    "qflash sm90_fwd",
)  # fmt: skip
CHECKED_ROWS = 512


def exact(case: Case, arrays: Arrays, kind: str, rope: bool = False) -> np.ndarray:
    """The last rows of the first head of the first sequence in float64: out, or dq of a train step.

    Neither heads nor query rows see each other, and the diagonal is anchored at the last row, so a part is a problem.
    """
    q, k, v = (x[:1, :, :1].astype(np.float64) for x in arrays.numpy)
    q = q[:, -CHECKED_ROWS:]
    if kind == TRAIN:
        dout = arrays.dout[:1, -CHECKED_ROWS:, :1].astype(np.float64)
        return reference.attention_backward(q, k, v, dout, causal=case.causal)[0]
    return reference.attention(q, k, v, causal=case.causal, rope=arrays.rope if rope else None)[0]


def refusal(error: Exception) -> str | None:
    """Why a candidate cannot take part, in a line; None if the error is not of that sort."""
    if isinstance(error, (Unavailable, NotImplementedError, qflash.NoKernelError)):
        return str(error).splitlines()[0]
    return "out of memory" if isinstance(error, RuntimeError) and "out of memory" in str(error).lower() else None


def measure(
    preset: Preset,
    *,
    budget: float = 3.0,
    min_rounds: int = 7,
    cases: tuple[Case, ...] | None = None,
    leave_out: tuple[str, ...] = (),
    on_skip: Callable[[str], None] = lambda text: None,
) -> Iterator[list[dict[str, Any]]]:
    """One list of rows per problem of `preset`. Candidates that cannot run are told to `on_skip`, once each.

    `leave_out` names candidates that need not take part.
    """
    shared = {"preset": preset.name} | rows.provenance(preset.device)
    if preset.kind == OVERHEAD:
        for case in cases or preset.cases:
            yield [shared | row for row in _overhead(preset, case, budget, min_rounds)]
        return
    clock, min_sample = _clock(preset)
    told = set()
    everyone = candidates(preset)
    for case in cases or preset.cases:
        arrays = Arrays(case, preset.device)
        truth = {rope: exact(case, arrays, preset.kind, rope) for rope in {one.rope for one in everyone}}
        calls, checked, taking_part = {}, {}, []
        for candidate in everyone:
            if candidate.name in leave_out:
                continue
            try:
                call = candidate.make(arrays)
                result = candidate.read(call())
            except Exception as error:
                reason = refusal(error)
                if reason is None:
                    raise
                if candidate.name not in told:
                    told.add(candidate.name)
                    on_skip(f"{candidate.name}: {reason}")
                continue
            calls[candidate.name] = call
            rel_l2 = errors(result[:1, -CHECKED_ROWS:, :1], truth[candidate.rope]).relative_l2
            checked[candidate.name] = {"rel_l2": float(f"{rel_l2:.3g}")} | _peak_memory(case, call, preset)
            taking_part.append(candidate)
        timing = compare(calls, clock=clock, budget=budget, min_rounds=min_rounds, min_sample=min_sample)
        yield [shared | _row(preset.kind, case, one, timing, checked[one.name]) for one in taking_part]


def _clock(preset: Preset) -> tuple[Clock, float]:
    """The clock of a preset, and how many seconds a sample of it must last."""
    if preset.framework == "jax":
        import jax

        # JAX hides its stream. Calls queue up and the last is waited for, once in a sample that dwarfs the wait.
        return WallClock(sync=jax.block_until_ready, settle=0), 0.02
    return CudaClock(graph=preset.graph) if preset.device == "cuda" else WallClock(), 1e-3


def _peak_memory(case: Case, call: Callable[[], Any], preset: Preset) -> dict[str, int]:
    """Bytes of GPU memory a call needs at its peak: q, k and v, its result, and whatever else torch allocates for it.

    On the CPU nobody counts allocations per call, and the process's high-water mark is not the call's: no figure. Nor
    does torch know what JAX allocates.
    """
    if preset.device != "cuda" or preset.framework != "torch":
        return {}
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return {"peak_bytes": rows.input_bytes(case) + torch.cuda.max_memory_allocated() - before}


def _overhead(preset: Preset, case: Case, budget: float, min_rounds: int) -> list[dict[str, Any]]:
    """Rows of calls on arrays so small that the call itself is what is timed."""
    taking_part = list(ways(case, preset.device))
    threads = qflash.get_num_threads()
    set_threads(1)  # waking a second thread is no part of what is asked for
    # Calls follow one another without a pause, as they do in a loop over layers.
    calls = {way.name: way.call for way in taking_part}
    clock = HostClock() if preset.device == "cuda" else WallClock(settle=0)
    timing = compare(calls, clock=clock, budget=budget, min_rounds=min_rounds)
    set_threads(threads)
    found = []
    for way in taking_part:
        row = {"threads": 1, "candidate": way.name, "framework": way.framework, "kernel": way.kernel, "precision": None}
        row |= {"us": timing.stats[way.name].as_dict(), "rel_l2": None}
        row["speedup"] = {way.peer: round(timing.speedup(way.name, over=way.peer), 3)} if way.peer else {}
        found.append(rows.problem(case, OVERHEAD) | row)
    return found


def _row(kind: str, case: Case, candidate: Candidate, timing: Comparison, checked: dict[str, Any]) -> dict[str, Any]:
    stats = timing.stats[candidate.name]
    row = rows.problem(case, kind) | {
        "candidate": candidate.name,
        "framework": candidate.framework,
        "kernel": candidate.kernel,
        "precision": candidate.precision,
        **({"rope": True} if candidate.rope else {}),
        "us": stats.as_dict(),
        **checked,
    }
    if kind in (FORWARD, TRAIN):
        row["gflops"] = round(rows.flop(case, kind) / stats.p50 / 1e3, 1)
    if kind == DECODE:
        row["gbs"] = round(rows.cache_bytes(case) / stats.p50 / 1e3, 2)
    others = [peer for peer in OVER if peer in timing.samples and candidate.name != peer]
    row["speedup"] = {peer: round(timing.speedup(candidate.name, over=peer), 3) for peer in others}
    return row


def set_threads(threads: int | None) -> None:
    """The same number of threads for qflash and torch; default: all cores."""
    threads = threads or machine.cores()
    qflash.set_num_threads(threads)
    if machine.version("torch"):
        import torch

        torch.set_num_threads(threads)


def main(names: list[str]) -> None:
    set_threads(None)
    for name in names:
        preset = PRESETS[name]
        collected = [row for part in measure(preset, on_skip=print) for row in part]
        path = rows.RESULTS / collected[0]["machine"] / f"{name}.jsonl"
        rows.write(path, collected)
        print(f"{len(collected)} rows in {path.relative_to(rows.ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name, preset in PRESETS.items() if preset.device == "cpu"])
