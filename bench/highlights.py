"""The few results shown on a kernel's page, at most MOST lines per machine. They are selected by problem, never by the
measurement: the pages of docs/results have every row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench import int8_gemm, linear, quantize, reductions, sm90_quantize, tables
from bench.tables import FP8, Row, best_peer, markdown, problem, rate, ratio

MOST = 6
FULL, CAUSAL = False, True


@dataclass(frozen=True)
class Attention:
    """Lines of one preset: problems as (head_dim, keys, mask), and a column for each of our candidates."""

    preset: str
    dtype: str
    ours: tuple[str, ...]
    problems: tuple[tuple[int, int, bool], ...]
    fp8: bool = False  # whether there is a column for the 8-bit peer

    def __call__(self) -> str:
        none = f"`qflash bench {self.preset}` makes them."
        return tables.by_machine(self.preset, self._table, none, keep=lambda row: row["dtype"] == self.dtype)

    def _table(self, rows: list[Row]) -> str:
        found = {(row["D"], row["Tk"], row["causal"], row["candidate"]): row for row in rows}
        header = ["problem", *self.ours, "best peer", *([FP8] if self.fp8 else [])]
        lines = []
        for what in self.problems:
            ours = [row for name in self.ours if (row := found.get((*what, name)))]
            if not ours:
                continue
            best = best_peer(ours[0])
            cells = [_with_ratio(row, best[0] if best else None) for row in ours]
            cells.append(f"{best[0]}, {rate(found[(*what, best[0])])}" if best else "")
            cells += [rate(found[(*what, FP8)]) if (*what, FP8) in found else "–"] if self.fp8 else []
            lines.append([f"{problem(ours[0])} {self.dtype}", *cells])
        return markdown(header, lines)


def _with_ratio(row: Row, peer: str | None) -> str:
    return rate(row) + (f", **{ratio(row['speedup'][peer])}**" if peer in row["speedup"] else "")


_AT_4096 = tuple((head_dim, 4096, mask) for head_dim in (64, 128) for mask in (FULL, CAUSAL))
_SHORT_TO_LONG = ((64, 1024, CAUSAL), *_AT_4096, (128, 16384, FULL))
_RUNG = ((64, 1024, CAUSAL), (64, 4096, FULL), (64, 16384, FULL), *_AT_4096[2:], (128, 16384, FULL))
_INT8 = (*_AT_4096, (128, 16384, FULL), (128, 16384, CAUSAL))
_HOPPER = ((64, 16384, FULL), (128, 4096, FULL), (128, 4096, CAUSAL))
_QUANTIZED = tuple(f"qflash {name}{how}" for name in ("sm90_int8", "sm90_int8_fp8") for how in ("", " (kernel alone)"))
_GROUP = "per group of 16"

# By page of docs/kernels.
TABLES: dict[str, Callable[[], str]] = {
    "decode": Attention("decode", "bfloat16", ("qflash sm90_decode",), ((128, 2048, FULL), (128, 32768, FULL))),
    "unfused": Attention("cuda", "float32", ("qflash unfused", "qflash fa"), _SHORT_TO_LONG),
    "fa": Attention("cuda", "float32", ("qflash fa",), _SHORT_TO_LONG),
    "fa_warps": Attention("ladder", "float16", ("qflash fa_warps", "qflash fa"), _RUNG),
    "fa_tc": Attention("ladder", "float16", ("qflash fa_tc", "qflash fa_warps"), _RUNG),
    "fa_mma": Attention("fa_mma", "bfloat16", ("qflash fa_mma",), _SHORT_TO_LONG),
    "fa_int8": Attention(
        "fa_int8", "bfloat16", ("qflash fa_int8", "qflash fa_int8 (kernel alone)", "qflash fa_mma"), _INT8
    ),
    "sm90_fwd": Attention(
        "sm90",
        "bfloat16",
        ("qflash sm90_fwd",),
        ((64, 512, CAUSAL), *_HOPPER, (128, 16384, CAUSAL), (256, 16384, FULL)),
    ),
    "sm90_int8": Attention(
        "sm90_int8",
        "bfloat16",
        _QUANTIZED,
        (*_HOPPER, (128, 16384, FULL), (128, 16384, CAUSAL), (256, 16384, FULL)),
        True,
    ),
    "cpu": Attention("cpu", "float32", ("qflash cpu",), ((64, 1024, CAUSAL), *_AT_4096)),
    "cpu_int8": Attention("cpu", "float32", ("qflash cpu_int8",), ((64, 1024, CAUSAL), *_AT_4096)),
    "reductions": partial(reductions.table, "reductions", keep=lambda row: row["columns"] == 8192),
    "quantize": partial(
        quantize.table,
        keep=lambda row: (
            row["dtype"] == "bfloat16"
            and row["what"]
            in ("per token", _GROUP, f"{_GROUP}, rope", f"{_GROUP}, smoothed", "per tensor", f"dequantize, {_GROUP}")
        ),
    ),
    "sm90_quantize": partial(
        quantize.table,
        sm90_quantize.NAME,
        keep=lambda row: row["shape"] == [4, 4096, 16, 128],
    ),
    "int8_gemm_tc": partial(
        int8_gemm.table,
        keep=lambda row: (
            row["candidate"] == "qflash int8_gemm_tc"
            and (row["m"] in (128, 4095, 4096) or (row["m"], row["b"]) == (8192, "k"))
        ),
    ),
    "cpu_linear": partial(linear.table, keep=lambda row: row["candidate"] == "qflash cpu_linear"),
    "gemm_mma": partial(
        linear.table,
        keep=lambda row: (
            row["candidate"] == "qflash gemm_mma"
            and (row["m"], row["n"], row["k"]) in ((8192,) * 3, (4096,) * 3, (16384, 8192, 2048))
        ),
    ),
}
