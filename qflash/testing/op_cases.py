"""Calls of every operation other than attention, independent of the framework.

A case is a dict of NumPy arrays and a function of them; on the CPU every front end must give NumPy's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

import qflash
from qflash import dispatch
from qflash.testing.runner import to_numpy

RNG = np.random.default_rng(8)


def floats(*shape: int) -> np.ndarray:
    """N(0, 1), float32."""
    return RNG.standard_normal(shape, dtype=np.float32)


def halves(*shape: int) -> np.ndarray:
    """N(0, 1), float16."""
    return floats(*shape).astype(np.float16)


def bytes_(*shape: int) -> np.ndarray:
    """int8, over its full range."""
    return RNG.integers(-128, 128, shape, dtype=np.int8)


@dataclass(frozen=True)
class OpCase:
    """`call` takes the arrays by name, of any framework, and forwards `kernel=`."""

    op: str
    arrays: dict[str, np.ndarray]
    call: Callable[..., Any]
    mapped: tuple[str, ...]  # arrays that get one more dimension in tests of vmap
    kv: str = "arrays"  # of attention: the type of k and v
    # Of linear: fields of its Spec
    dtype: str = "float16"
    precision: str = "native"
    activation: str = ""
    layout: str = "n"

    def kernels(self, device: str) -> list[str]:
        """The kernels that support it on a device."""
        return [v.kernel.name for v in dispatch.variants_of(self.op, device, self.kv) if self._is_served_by(v)]

    def _is_served_by(self, variant: dispatch.Variant) -> bool:
        if self.op != "linear":
            return True
        spec = variant.spec(variant.kernel.min_arch, self.dtype)
        spec = replace(spec, precision=self.precision, activation=self.activation, layout=self.layout)
        return not dispatch.reasons(variant.kernel, spec)


COS, SIN = qflash.rope_tables(12, 8)
_PARTS = {
    "out_a": floats(2, 5, 3, 24),
    "lse_a": floats(2, 3, 5),
    "out_b": floats(2, 5, 3, 24),
    "lse_b": floats(2, 3, 5),
}

_PLACES = np.array([3, -3, 0, 11, -11, 5, 5, 1, 2, 9, -7, 4], np.int32)


def _rotated(x: Any, cos: Any, sin: Any, *, interleaved: bool = False, **more: Any) -> Any:
    return qflash.rope(x, qflash.Rope(cos, sin, interleaved), **more)


# Arrays, a function of them, the mapped arrays, and the result's dtype.
_PRODUCTS = {
    "": ({"a": bytes_(9, 33), "b": bytes_(33, 21)}, qflash.int8_matmul, ("a",), "int32"),
    " both mapped": ({"a": bytes_(9, 33), "b": bytes_(33, 21)}, qflash.int8_matmul, ("a", "b"), "int32"),
    " tiles": ({"a": bytes_(300, 400), "b": bytes_(400, 272)}, qflash.int8_matmul, ("a",), "int32"),
    " scaled": (
        {
            "a": bytes_(2, 5, 33),
            "b": bytes_(33, 21),
            "a_scale": floats(2, 5),
            "b_scale": floats(21),
            "bias": floats(21),
        },
        partial(qflash.int8_matmul, out_dtype="float16"),
        ("a",),
        "float16",
    ),
    " numbers": (
        {"a": bytes_(9, 33), "b": bytes_(33, 21), "b_scale": np.array(0.125, np.float32)},
        partial(qflash.int8_matmul, a_scale=0.25),
        ("a",),
        "float32",
    ),
}


def _int8_matmul(
    arrays: dict[str, np.ndarray], call: Callable[..., Any], mapped: tuple[str, ...], dtype: str
) -> OpCase:
    return OpCase("linear", arrays, call, mapped, dtype=dtype, precision="int8")


CASES = {
    "softmax": OpCase("softmax", {"x": floats(3, 4, 37)}, partial(qflash.softmax, scale=0.7), ("x",)),
    "softmax one row": OpCase("softmax", {"x": floats(5)}, qflash.softmax, ("x",)),
    "softmax long rows": OpCase("softmax", {"x": floats(3, 20011)}, qflash.softmax, ("x",)),
    "layer_norm": OpCase(
        "layer_norm",
        {"x": floats(3, 4, 37), "weight": floats(37), "bias": floats(37)},
        partial(qflash.layer_norm, eps=1e-3, return_stats=True),
        ("x",),
    ),
    "layer_norm weights mapped": OpCase(
        "layer_norm", {"x": floats(4, 37), "weight": floats(37)}, qflash.layer_norm, ("weight",)
    ),
    "cross_entropy": OpCase(
        "cross_entropy",
        {"logits": floats(4, 3, 19), "targets": np.array([[0, 18, -100], [3, 4, 5], [1, 1, 1], [9, 2, -100]])},
        partial(qflash.cross_entropy, return_lse=True),
        ("logits", "targets"),
    ),
    "cross_entropy none": OpCase(
        "cross_entropy",
        {"logits": floats(4, 19), "targets": np.array([0, 18, 7, 3], np.int32)},
        partial(qflash.cross_entropy, reduction="none", label_smoothing=0.1, ignore_index=7),
        ("logits", "targets"),
    ),
    **{f"int8_matmul{name}": _int8_matmul(*case) for name, case in _PRODUCTS.items()},
    "linear": OpCase(
        "linear",
        {"x": halves(2, 9, 33), "w": halves(33, 21), "bias": floats(21), "residual": halves(2, 9, 21)},
        partial(qflash.linear, activation="gelu"),
        ("x", "residual"),
        activation="gelu",
    ),
    "linear plain": OpCase("linear", {"x": halves(9, 40), "w": halves(40, 24)}, qflash.linear, ("x",)),
    "linear one row": OpCase(
        "linear",
        {"x": halves(40), "w": halves(40, 24), "bias": halves(24)},
        partial(qflash.linear, activation="silu", out_dtype="float32"),
        ("x",),
        activation="silu",
    ),
    "linear weights mapped": OpCase(
        "linear",
        {"x": halves(9, 40), "w": halves(40, 24), "bias": halves(24)},
        partial(qflash.linear, activation="gelu_tanh"),
        ("w", "bias"),
        activation="gelu_tanh",
    ),
    "linear tiles": OpCase("linear", {"x": halves(300, 272), "w": halves(272, 400)}, qflash.linear, ("x",)),
    "swiglu": OpCase(
        "linear",
        {"x": halves(2, 9, 40), "gate": halves(40, 24), "up": halves(40, 24), "gate_bias": halves(24)},
        qflash.swiglu,
        ("x",),
        activation="swiglu",
    ),
    "linear in INT8": OpCase(
        "linear",
        {"x": halves(2, 9, 33), "w": halves(21, 33).T, "bias": floats(21), "residual": halves(2, 9, 21)},
        partial(qflash.linear, activation="gelu", precision="int8"),
        ("x", "residual"),
        precision="int8",
        layout="k",
        activation="gelu",
    ),
    "swiglu of QuantizedLinear": OpCase(
        "linear",
        {"x": halves(9, 40), "gate": halves(24, 40).T, "up": halves(24, 40).T, "up_bias": floats(24)},
        lambda x, gate, up, **more: qflash.swiglu(x, *map(qflash.quantize_linear, (gate, up)), **more),
        ("x", "gate", "up"),
        precision="int8",
        layout="k",
        activation="swiglu",
    ),
    "merge": OpCase("merge", _PARTS, qflash.merge, tuple(_PARTS)),
    "merge packed": OpCase(
        "merge",
        {"out_a": floats(9, 3, 20), "lse_a": floats(3, 9), "out_b": halves(9, 3, 20), "lse_b": floats(3, 9)},
        qflash.merge,
        ("out_a", "lse_a", "out_b", "lse_b"),
    ),
    "rope": OpCase("rope", {"x": floats(2, 12, 3, 24), "cos": COS, "sin": SIN}, _rotated, ("x",)),
    "rope packed": OpCase(
        "rope",
        {"x": halves(12, 3, 16), "cos": COS, "sin": SIN, "positions": _PLACES},
        partial(_rotated, interleaved=True),
        ("x", "positions"),
    ),
    "rope positions mapped": OpCase(
        "rope",
        {"x": floats(2, 12, 5, 8), "cos": COS, "sin": SIN, "positions": np.stack([_PLACES, _PLACES[::-1]])},
        _rotated,
        ("positions",),
    ),
    "rope tables mapped": OpCase("rope", {"x": halves(2, 12, 3, 9), "cos": COS, "sin": SIN}, _rotated, ("cos", "x")),
    "quantize": OpCase("quantize", {"x": floats(7, 24)}, qflash.quantize, ("x",)),
    "quantize asymmetric": OpCase(
        "quantize", {"x": floats(2, 12, 3, 24)}, partial(qflash.quantize, symmetric=False), ("x",)
    ),
    "quantize groups": OpCase(
        "quantize",
        {"x": floats(2, 12, 3, 24), "lens": np.array([12, 5], np.int32), "cos": COS, "sin": SIN},
        lambda x, lens, cos, sin, **more: qflash.quantize(
            x, granularity="group", group=5, smooth=True, lens=lens, rope=qflash.Rope(cos, sin, True), **more
        ),
        ("x",),
    ),
    "quantize stochastic": OpCase(
        "quantize",
        {"x": floats(7, 24)},
        partial(qflash.quantize, granularity="token", rounding="stochastic", seed=3),
        ("x",),
    ),
    "dequantize": OpCase(
        "dequantize",
        {"values": bytes_(2, 12, 3, 24), "scale": abs(floats(2, 3, 12)), "mean": floats(2, 3, 24)},
        lambda values, scale, mean, **more: qflash.dequantize(
            qflash.Quantized(values, scale, mean=mean, granularity="token"), "float16", **more
        ),
        ("values", "scale", "mean"),
    ),
    "attention_int8": OpCase(
        "attention",
        {"q": halves(2, 9, 4, 24), "k": halves(2, 40, 2, 24), "v": halves(2, 40, 2, 24)},
        lambda q, k, v, **more: qflash.attention(
            qflash.quantize(q, granularity="token"),
            qflash.quantize(k, granularity="group", smooth=True),
            v,
            causal=True,
            **more,
        ),
        ("q", "k", "v"),
        "quantized",
    ),
    "attention_int8 zero points": OpCase(
        "attention",
        {"q": halves(2, 9, 4, 24), "kv": halves(2, 40, 2, 24), "lens": np.array([40, 7], np.int32)},
        lambda q, kv, lens, **more: qflash.attention(
            qflash.quantize(q, symmetric=False),
            qflash.quantize(kv, symmetric=False, lens=lens),
            qflash.quantize(kv, symmetric=False, lens=lens),
            kv_lens=lens,
            window=(20, 3),
            **more,
        ),
        ("q", "kv"),
        "quantized",
    ),
}


def flat(result: Any) -> list[Any]:
    """The arrays of a result, which is one array, a tuple, or a Quantized."""
    if isinstance(result, qflash.Quantized):
        result = [getattr(result, field.name) for field in fields(result)]
        return [x for x in result if hasattr(x, "shape")]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def check_equal(got: Any, wanted: Any) -> None:
    """Check for the same shapes, dtypes and bits."""
    got, wanted = ([np.asarray(x) for x in flat(side)] for side in (got, wanted))
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


def check_close(got: Any, wanted: Any) -> None:
    """Check a GPU's results against the CPU's: integers bit for bit, floats within a few ulp of the largest."""
    got, wanted = ([to_numpy(x) for x in flat(side)] for side in (got, wanted))
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        if theirs.dtype.kind == "i":
            np.testing.assert_array_equal(mine, theirs)
        else:
            exact = theirs.astype(np.float64)
            reach = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
            atol = reach * TOLERANCE[theirs.dtype.name]
            np.testing.assert_allclose(mine.astype(np.float64), exact, rtol=0, atol=atol)
