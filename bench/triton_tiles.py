"""Tiles of triton_fwd timed against each other on the current GPU, to choose its static table.

python -m bench.triton_tiles   writes bench/results/<machine>/triton-tiles.jsonl; `qflash report` makes the table.

The library never tunes at run time; tuning is done here. Each candidate is the kernel with one tile, and speed-ups are
over the tile in the table.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bench import rows, tables
from bench.attention import CHECKED_ROWS, CheckedArrays
from bench.presets import FORWARD, PRESETS
from bench.run import Candidate, Row, Suite, main, tried
from qflash import dispatch
from qflash.backends import triton as backend
from qflash.call.prepare import bind
from qflash.ops import attention
from qflash.ops.problem import Options, check
from qflash.testing import Case, errors
from qflash.testing.timing import Call, Comparison

NAME, KERNEL, TABLES_OWN = "triton-tiles", "triton_fwd", "the table's"
LENGTHS = (1024, 16384)
# (rows, keys, warps, stages) by head_dim. None of them spills more than a few words on Hopper.
TILES = {
    64: ((128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3), (128, 32, 4, 3), (64, 64, 4, 3), (64, 128, 4, 3)),
    128: ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 8, 2)),
}


def _call(tile: tuple[int, int, int, int] | None, arrays: CheckedArrays) -> Call:
    """triton_fwd with a tile, or with that of its table, into a result at a fixed address."""
    import torch

    from qflash.frontends.torch import launch
    from qflash.frontends.torch.arrays import arch_of_device, describe
    from qflash.triton import triton_fwd

    given = dict(zip("qkv", arrays.torch, strict=True))
    problem = check(*(describe(name, x) for name, x in given.items()), Options(causal=arrays.case.causal))
    plan = replace(attention.plan_of(problem, given, False), kernel=KERNEL)
    arch = arch_of_device(given["q"].device)
    entry = backend.entry_of(triton_fwd.launches(plan.spec(arch), tile), arch)
    prepared = bind(plan, dispatch.BY_NAME[KERNEL], entry)
    (out,) = launch.empty_results(plan, given["q"])
    held = [given[operand.argument] for operand in plan.operands]

    def run() -> Any:
        stream = torch.cuda.current_stream().cuda_stream if arrays.device == "cuda" else 0
        prepared.call(*(x.data_ptr() for x in (*held, out)), 0, stream, 0)
        return out

    return tried(run)


class Tiles(Suite):
    name, device, over = NAME, "cuda", (TABLES_OWN,)

    def __init__(self, device: str = "cuda"):
        self.device = device
        self.cases = [case for case in PRESETS["triton"].cases if case.q_len in LENGTHS or case.dtype == "bfloat16"]

    def arrays(self, case: Case) -> CheckedArrays:
        return CheckedArrays(case, self.device, FORWARD)

    def candidates(self, arrays: CheckedArrays) -> list[Candidate]:
        tiles = {TABLES_OWN: None} | {" × ".join(map(str, tile)): tile for tile in TILES[arrays.case.head_dim]}
        return [Candidate(name, partial(_call, tile), KERNEL) for name, tile in tiles.items()]

    def problem(self, arrays: CheckedArrays) -> Row:
        return rows.problem(arrays.case, NAME)

    def check(self, arrays: CheckedArrays, candidate: Candidate, call: Call, result: Any) -> float:
        found = result[:1, -CHECKED_ROWS:, :1].float().cpu().numpy()
        return float(f"{errors(found, arrays.truth).relative_l2:.3g}")

    def row(self, arrays: CheckedArrays, candidate: Candidate, checked: float, timing: Comparison) -> Row:
        stats = timing.stats[candidate.name]
        about = {"candidate": candidate.name, "kernel": KERNEL, "rel_l2": checked, "us": stats.as_dict()}
        return about | {"gflops": round(rows.flop(arrays.case, FORWARD) / stats.p50 / 1e3, 1)}


def table(machine: str | None = None) -> str:
    """One table per machine with committed rows: a line per problem and tile."""

    def of(found: list[Row]) -> str:
        lines = [
            [f"{tables.problem(row)} {row['dtype']}", row["candidate"], tables.time(row), tables.rate(row),
             tables.ratio(row["speedup"].get(TABLES_OWN)), tables.error(row)]
            for row in found
        ]  # fmt: skip
        header = ["problem", "rows × keys × warps × stages", "time", "rate", f"× {TABLES_OWN}", "error"]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(NAME, of, "`python -m bench.triton_tiles` makes them.", machine)


if __name__ == "__main__":
    main(Tiles())
