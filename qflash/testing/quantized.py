"""attention on qflash.Quantized: modes, cases, and the differences that rounding allows.

In every mode, integers represent exact numbers, and sums of their products are exact. So a kernel is compared with
float64 attention on those numbers, row by row, relative to the row's sum of weight times |v|. With unit roundoff u of
the result's dtype (2^-11 for float16, 2^-8 for bfloat16), a kernel may round weights and results, 2 u, and if V is INT8
also the values it represents, 3 u. A score computed in float32 from an integer and a rounded slope may have an error of
s = SCORE_UNITS times the change of the score when the integer grows by 1, which changes weights by 2 s. lse is the
logarithm of a sum of weights: u + s, and FLOAT32 of its terms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import qflash
from qflash import reference
from qflash.ops.problem import Options
from qflash.reference.quantize import dequantize
from qflash.testing.case import Case
from qflash.testing.compare import UNIT_ROUNDOFF

SCORE_UNITS = 1.5
FLOAT32 = 4e-6

_TOKEN = {"granularity": "token"}
_GROUP = {"granularity": "group", "group": 16}
_ZERO_POINT = {"granularity": "tensor", "symmetric": False}
# How q, k and v are quantized; None: v is not.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "groups": (_TOKEN, {**_GROUP, "smooth": True}, None),
    "groups_integer_v": (_TOKEN, {**_GROUP, "smooth": True}, _GROUP),
    "wide_groups": ({"granularity": "group", "group": 24}, {"granularity": "group", "group": 64, "smooth": True}, None),
    "tensor": ({}, {}, None),
    "tensor_integer_v": ({}, {"smooth": True}, _TOKEN),
    "zero_points": (_ZERO_POINT, _ZERO_POINT, None),
    "zero_points_smooth": (_ZERO_POINT, {**_ZERO_POINT, "smooth": True}, None),
    "zero_points_integer_v": (_ZERO_POINT, _ZERO_POINT, _ZERO_POINT),
}


@dataclass(frozen=True)
class QuantizedCase:
    """A Case whose arrays are quantized before attention."""

    case: Case
    mode: str

    def __str__(self) -> str:
        return f"{self.mode}-{self.case.name}"

    @property
    def options(self) -> Options:
        return Options(**self.case.options())

    @property
    def integer_v(self) -> bool:
        return MODES[self.mode][2] is not None

    def inputs(self) -> tuple[Any, Any, Any, np.ndarray | None]:
        """q and k as Quantized, v by the mode, kv_lens; NumPy. Keys that do not exist do not affect scales."""
        inputs = self.case.make_inputs()
        q_words, k_words, v_words = MODES[self.mode]
        q = qflash.quantize(inputs.q, **q_words)
        k = qflash.quantize(inputs.k, lens=inputs.kv_lens, **k_words)
        v = inputs.v if v_words is None else qflash.quantize(inputs.v, lens=inputs.kv_lens, **v_words)
        return q, k, v, inputs.kv_lens

    def score_error(self) -> float:
        """The allowed error of a score."""
        q, k, *_ = self.inputs()
        scale = self.case.head_dim**-0.5 if self.case.scale is None else abs(self.case.scale)
        largest = [np.nanmax(np.asarray(x.scale), initial=0.0) for x in (q, k)]
        return SCORE_UNITS * scale * largest[0] * largest[1] + FLOAT32

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(out, lse, weight of each row in the order of `lse`), float64."""
        q, k, v, kv_lens = self.inputs()
        q, k, v = (x if isinstance(x, np.ndarray) else meant(x) for x in (q, k, v))
        words = {**self.case.options(), "kv_lens": kv_lens}
        out, lse = reference.attention(q, k, v, **words)
        with np.errstate(invalid="ignore"):
            size, _ = reference.attention(q, k, np.abs(v.astype(np.float64)), **words)
            return out, lse, np.sqrt((size * size).sum(-1)).swapaxes(1, 2)


def meant(x: qflash.Quantized) -> np.ndarray:
    """The numbers that integers represent, float32."""
    group = {"tensor": None, "token": 1, "group": x.group}[x.granularity]
    return dequantize(x.values, np.asarray(x.scale), _one(x.zero_point), x.mean, group=group)


def _one(zero_point: Any) -> np.ndarray | None:
    return None if zero_point is None else np.asarray(zero_point).reshape(1)


def check_meant(case: QuantizedCase, out: np.ndarray, lse: np.ndarray) -> None:
    """Check a result against attention on the numbers that the integers represent."""
    want, want_lse, weight = case.expected()
    assert out.dtype == case.case.dtype and out.shape == want.shape and lse.shape == want_lse.shape
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    for name, got, wanted in (("out", out, want), ("lse", lse, want_lse)):
        for kind in (np.isnan, np.isposinf, np.isneginf):
            assert np.array_equal(kind(got), kind(wanted)), f"{case}: {name} has {kind.__name__} in other places"
    unit, score = UNIT_ROUNDOFF[case.case.dtype], case.score_error()
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isfinite(want), out - want, 0.0)
        error = np.sqrt((difference * difference).sum(-1)).swapaxes(1, 2)
        relative = unit * (3 if case.integer_v else 2) + 2 * score
        allowed = relative * np.where(np.isfinite(weight), weight, np.inf)
        of_lse = np.where(np.isfinite(want_lse), np.abs(lse - want_lse), 0.0)
    assert (error <= allowed).all(), f"{case}: error {(error / allowed).max():.3g} times what is allowed"
    allowed = unit + score + FLOAT32 * (1 + np.where(np.isfinite(want_lse), np.abs(want_lse), 0.0))
    assert (of_lse <= allowed).all(), f"{case}: lse is off by {(of_lse / allowed).max():.3g} times what is allowed"


def _problems() -> list[Case]:
    return [
        Case("plain", 70, 130, 2, 2, seed=1),
        Case("causal_gqa", 50, 77, 4, 2, head_dim=64, batch=2, causal=True, seed=2),
        Case("window", 90, 100, 2, 1, head_dim=32, window=(20, 3), seed=3),
        Case("padding", 40, 96, 2, 2, head_dim=32, batch=4, kv_lens=(0, 1, 50, 96), seed=4),
        Case("softcap", 40, 60, 2, 2, head_dim=64, causal=True, softcap=5.0, seed=5),
        Case("scale_negative", 30, 40, 1, 1, head_dim=32, scale=-0.2, seed=6),
        Case("odd_dim", 33, 65, 2, 1, head_dim=40, causal=True, seed=7),
        Case("biased_k", 64, 128, 2, 2, data="biased_k", seed=8),
        Case("nan_q", 40, 40, 2, 2, causal=True, plant=(("q", (0, 17, 1, 5), "nan"),), seed=9),
        Case("inf_k", 40, 40, 2, 2, causal=True, plant=(("k", (0, 20, 0, 63), "inf"),), seed=10),
        Case("nan_v", 40, 40, 2, 2, causal=True, plant=(("v", (0, 25, 1, 0), "nan"),), seed=11),
        Case("zeros", 20, 30, 1, 1, plant=(("q", (0,), "0"), ("k", (0, slice(0, 16)), "0")), seed=12),
        Case("dim_128", 60, 90, 2, 2, head_dim=128, causal=True, seed=13),
        Case("dim_256", 20, 70, 1, 1, head_dim=256, seed=14),
        Case("decode", 1, 300, 4, 1, head_dim=64, causal=True, seed=15),
    ]


def _all() -> list[QuantizedCase]:
    return [
        QuantizedCase(replace(case, dtype=("float16", "bfloat16")[(i + j) % 2]), mode)
        for i, case in enumerate(_problems())
        for j, mode in enumerate(MODES)
    ]


CASES = _all()
# Every mode, and every problem, once or twice.
FEW = [x for i, x in enumerate(CASES) if i % len(MODES) == i // len(MODES) % len(MODES)]
