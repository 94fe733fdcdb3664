"""Decoding of sequences of different lengths, compared with a batch of equal lengths that reads as many bytes.

Both batches of a candidate are timed in the same rounds, so the speed-up over its equal lengths is the share of the
bandwidth that remains with different lengths: 1 if the work is evenly distributed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench import rows, tables
from bench.arrays import Candidate
from bench.paged import PagedArrays
from bench.peers import candidates
from bench.presets import MIXED, Preset
from bench.run import Row, Suite
from qflash.testing import Case, errors
from qflash.testing.timing import Call, Comparison

NAME = "decode_mixed"
DIFFERENT, EQUAL = "mixed", "uniform"  # lengths


@dataclass(frozen=True)
class OneBatch(Candidate):
    """A candidate on one of the two batches."""

    of: str = ""  # the candidate's own name
    lengths: str = DIFFERENT


def equal_lengths(lens: tuple[int, ...]) -> tuple[int, ...]:
    """As many sequences and tokens, with lengths that differ by at most one token."""
    each, more = divmod(sum(lens), len(lens))
    return tuple(each + (index < more) for index in range(len(lens)))


class BothBatches:
    """The arrays of both batches of a case."""

    def __init__(self, case: Case, device: str):
        self.case = case
        assert case.kv_lens is not None
        equal = replace(case, kv_lens=equal_lengths(case.kv_lens))
        self.batches = {DIFFERENT: PagedArrays(case, device), EQUAL: PagedArrays(equal, device)}


class MixedLengths(Suite):
    def __init__(self, preset: Preset):
        self.name, self.device, self.cases, self.graph = preset.name, preset.device, preset.cases, preset.graph
        self._candidates = [
            OneBatch(
                f"{one.name}, {lengths}",
                partial(_made, one, lengths),
                kernel=one.kernel,
                precision=one.precision,
                int8_pages=one.int8_pages,
                of=one.name,
                lengths=lengths,
            )
            for one in candidates(preset)
            for lengths in (DIFFERENT, EQUAL)
        ]

    def arrays(self, case: Case) -> BothBatches:
        return BothBatches(case, self.device)

    def candidates(self, arrays: BothBatches) -> list[OneBatch]:
        return self._candidates

    def problem(self, arrays: BothBatches) -> Row:
        lens = arrays.case.kv_lens or ()
        return rows.problem(arrays.case, MIXED) | {"tokens": sum(lens), "shortest": min(lens), "longest": max(lens)}

    def check(self, arrays: BothBatches, candidate: OneBatch, call: Call, result: Any) -> float:
        found = errors(candidate.read(result)[:1, :, :1], arrays.batches[candidate.lengths].truth).relative_l2
        return float(f"{found:.3g}")

    def row(self, arrays: BothBatches, candidate: OneBatch, checked: float, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        return {
            "candidate": candidate.name,
            "framework": candidate.framework,
            "kernel": candidate.kernel,
            "precision": candidate.precision,
            "of": candidate.of,
            "lengths": candidate.lengths,
            "us": stats.as_dict(),
            "rel_l2": checked,
            "gbs": round(rows.cache_bytes(arrays.case, candidate.int8_pages) / stats.p50 / 1e3, 2),
        }

    def rivals(self, candidate: OneBatch) -> tuple[str, ...]:
        return (f"{candidate.of}, {EQUAL}",)


def _made(one: Candidate, lengths: str, arrays: BothBatches) -> Call:
    return one.make(arrays.batches[lengths])


def table(machine: str | None = None) -> str:
    """One table per machine with committed rows: a line per candidate, with its rate on both batches."""

    def of(found: list[Row]) -> str:
        by_batch = {(row["of"], row["lengths"]): row for row in found}
        lines = []
        for row in found:
            equal = by_batch.get((row["of"], EQUAL))
            if row["lengths"] != DIFFERENT or equal is None:
                continue
            share = row["speedup"].get(equal["candidate"])
            name = f"**{row['of']}**" if row["kernel"] else row["of"]
            cells = [tables.rate(equal), tables.time(row), tables.rate(row), f"**{share:.1%}**", tables.error(row)]
            lines.append([name, *cells])
        first = found[0]
        batch = f"{first['B']} sequences of {first['shortest']} to {first['longest']} tokens, {first['tokens']} in all"
        header = [batch, "equal lengths", "time", "these lengths", "of the rate of equal ones", "error"]
        return tables.markdown(header, lines)

    return tables.by_machine(NAME, of, f"`qflash bench {NAME}` makes them.", machine)
