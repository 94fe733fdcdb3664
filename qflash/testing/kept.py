"""A Case whose keys and values are a QuantizedKV of precision "int8", made by the replay of `quantize_kv`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from qflash import dispatch
from qflash.call.array import Array
from qflash.call.op import Plan
from qflash.frontends import numpy as numpy_frontend
from qflash.ops.attention_kv import ATTENTION_KEPT, kept_call
from qflash.ops.kv import QuantizedKV
from qflash.ops.problem import Options
from qflash.reference import sm90_quantize
from qflash.rotary import Rope
from qflash.testing.case import Case, Inputs

PRECISION = "int8"


@dataclass(frozen=True)
class KeptInputs:
    """A Case's arrays with k and v quantized (NumPy). rope rotates only q."""

    q: np.ndarray
    kv: QuantizedKV
    rope: Rope | None = None
    sinks: np.ndarray | None = None


def is_kept(kernel: str) -> bool:
    """Whether a variant of a kernel supports a QuantizedKV of this precision."""
    variant = dispatch.VARIANTS[kernel]
    return (variant.kv, variant.precision) == ("kept", PRECISION)


def on_kept(case: Case, inputs: Inputs) -> KeptInputs:
    """The case's keys, rotated, in the integers of `quantize_kv`; values unchanged."""
    made = sm90_quantize.quantize_kv(inputs.k, None, kv_lens=inputs.kv_lens, rope=inputs.rope)
    parts = {name: getattr(made, name) for name in sm90_quantize.OF_KEYS}
    kv = QuantizedKV(**parts, v=inputs.v, lens=inputs.kv_lens, dtype=case.dtype, precision=PRECISION)
    rope = inputs.rope
    if rope is not None:
        rope = Rope(rope.cos, rope.sin, rope.interleaved, rope.positions_q, None)
    return KeptInputs(inputs.q, kv, rope, inputs.sinks)


def plan_of(
    case: Case, inputs: KeptInputs, kernel: str | None, device: str, batch_invariant: bool = False
) -> tuple[Plan, dict[str, Any]]:
    """The plan of attention on it with lse, and its arrays by name. kernel: a variant's name."""
    name = None if kernel is None else dispatch.VARIANTS[kernel].kernel.name
    options = Options(**case.options(), precision=None, kernel=name, batch_invariant=batch_invariant)
    arrays, words = kept_call(inputs.q, inputs.kv, None, options, None, inputs.rope, inputs.sinks, True)
    named = {name: x for name, x in zip(ATTENTION_KEPT.arrays, arrays, strict=True) if x is not None}
    described = {name: numpy_frontend.describe(name, x) for name, x in named.items()}
    on_device = {name: Array(x.shape, x.strides, x.dtype, device) for name, x in described.items()}
    return ATTENTION_KEPT.plan(*(on_device.get(name) for name in ATTENTION_KEPT.arrays), *words), named


def converted(kv: QuantizedKV, turn: Any) -> QuantizedKV:
    """The same in the arrays of another framework."""
    parts = {field.name: getattr(kv, field.name) for field in fields(kv)}
    return QuantizedKV(**{name: turn(x) if isinstance(x, np.ndarray) else x for name, x in parts.items()})
