"""Call: everything static about one attention call; with the arrays' shapes it is a Problem again.

Batching and partitioning change shapes after the user's arguments were checked, so a Call has none: whoever needs a
Problem (the lowering rules) asks for one with the shapes at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qflash import _native
from qflash.call.array import Array
from qflash.call.spec import PRECISIONS
from qflash.ops.problem import Options, Problem, RopeArrays, check, check_packed

# Optional operands in the order the handlers take them, each with the bit of `operands` that announces it.
OPTIONAL = {
    "cu_seqlens_q": "packed",
    "cu_seqlens_k": "packed",
    "kv_lens": "kv_lens",
    "cos": "rope",
    "sin": "rope",
    "positions_q": "positions_q",
    "positions_k": "positions_k",
    "dlse": "dlse",
}


@dataclass(frozen=True, slots=True)
class Call:
    """Hashable: jit's static argument. Numbers are plain Python ones, so that equal calls compile alike."""

    operands: tuple[str, ...]  # names of the arrays after q, k, v, in OPTIONAL's order
    window: tuple[int, int]
    scale: float
    softcap: float
    precision: str
    kernel: str | None
    interleaved: bool
    max_seqlens: tuple[int, int] | None  # packed arrays only

    @property
    def packed(self) -> bool:
        return self.max_seqlens is not None

    def index(self, name: str) -> int | None:
        """Where operand `name` stands among all operands; None: it is absent."""
        return 3 + self.operands.index(name) if name in self.operands else None

    def with_operand(self, name: str) -> Call:
        """This call with one more operand, the last."""
        return replace(self, operands=(*self.operands, name))

    def problem(self, arrays: Sequence[Array]) -> Problem:
        """The checked Problem for operands of these shapes; raises what `problem.check` raises."""
        q, k, v, *rest = arrays
        named = dict(zip(self.operands, rest, strict=True))
        rope = None
        if "cos" in named:
            positions = named.get("positions_q"), named.get("positions_k")
            rope = RopeArrays(named["cos"], named["sin"], self.interleaved, *positions)
        precision = None if self.precision == PRECISIONS[0] else self.precision
        options = Options(False, self.window, self.softcap, self.scale, precision, self.kernel)
        if self.max_seqlens is None:
            return check(q, k, v, options, named.get("kv_lens"), rope)
        cu_seqlens = named["cu_seqlens_q"], named["cu_seqlens_k"]
        return check_packed(q, k, v, *cu_seqlens, *self.max_seqlens, options, named.get("kv_lens"), rope)

    def attributes(self, key: str) -> dict[str, Any]:
        """The handlers' attributes. XLA tells float32 from float64 and insists on what the handler declared."""
        present = {OPTIONAL[name] for name in self.operands}
        max_seqlens = self.max_seqlens or (0, 0)
        return {
            "kernel": key,
            "scale": np.float32(self.scale),
            "softcap": np.float32(self.softcap),
            "precision": np.int64(_native.xla_precisions[self.precision]),
            "window_left": np.int64(self.window[0]),
            "window_right": np.int64(self.window[1]),
            "max_seqlen_q": np.int64(max_seqlens[0]),
            "max_seqlen_k": np.int64(max_seqlens[1]),
            "operands": np.int64(sum(_native.xla_operands[bit] for bit in present)),
            "interleaved": bool(self.interleaved),
        }


def call_of(problem: Problem, operands: tuple[str, ...]) -> Call:
    """The static part of a checked problem."""
    return Call(
        operands=operands,
        window=(problem.window_left, problem.window_right),
        scale=problem.scale,
        softcap=problem.softcap,
        precision=problem.precision,
        kernel=problem.kernel,
        interleaved=problem.rope_interleaved,
        max_seqlens=(problem.q_len, problem.k_len) if problem.packed else None,
    )
