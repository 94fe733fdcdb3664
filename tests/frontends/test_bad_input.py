"""One table of wrong values, tried on every argument of every operation in every front end.

A refusal names the argument, what came and what is allowed. A value of the wrong class is a TypeError and a wrong value
of the right class is a ValueError, in every front end alike: the table has one exception for each wrong value.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import qflash
from qflash.dispatch import kernels_of
from qflash.ops import OPS
from qflash.ops.kv import results_of

# Front ends ----------------------------------------------------------------------------------------------------------


@lru_cache
def make(framework: str) -> Callable[[Any], Any]:
    """The function that makes an array of a framework from one of NumPy's."""
    if framework == "torch":
        return pytest.importorskip("torch").from_numpy
    if framework == "jax":
        return pytest.importorskip("jax.numpy").asarray
    return lambda x: x


def foreign(framework: str, good: Any) -> Any:
    """An array that is of another framework."""
    return np.zeros(3, np.float32) if framework != "numpy" else make("torch")(np.zeros(3, np.float32))


# Wrong values --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Wrong:
    """A wrong value, or a function that makes one, its exception, and what the text says that came."""

    value: Any
    error: type[Exception]
    came: str

    def of(self, framework: str, good: Any) -> Any:
        """`good`: the right one."""
        return self.value(framework, good) if callable(self.value) else self.value


def array(shape: tuple[int, ...] | None, dtype: str | None = "float32") -> Callable[[str, Any], Any]:
    """An array of the front end. None: of the shape or the dtype that is right."""

    def made(framework: str, good: Any) -> Any:
        right = dtype or str(good.dtype).removeprefix("torch.")
        return make(framework)(np.zeros(getattr(good, "shape", (2, 3)) if shape is None else shape, right))

    return made


def wrong_class(*values: Any) -> list[Wrong]:
    """Values that are shown as they are, or by their class."""
    return [Wrong(x, TypeError, f"{re.escape(repr(x))}|{type(x).__qualname__}|given") for x in values]


def wrong_value(*values: Any) -> list[Wrong]:
    return [Wrong(x, ValueError, rf"{re.escape(repr(x))}|an int of \d+ bits|{re.escape(str(x))}") for x in values]


ARRAY = Wrong(array(()), TypeError, "Array|ndarray|Tensor")
NONE = wrong_class(None)
NUMBER = [
    *wrong_class(True, np.True_, "1", [1.0], (1.0,), {}, 1j, np.complex64(1), np.array(1.0)),
    *wrong_value(float("nan"), float("-inf"), np.float32("inf"), 10**400),
    ARRAY,
]
FLAG = [*wrong_class(None, "yes", 2, -1, 1.0, np.float32(1), [True], (), np.array(True)), ARRAY]
INT = [
    *wrong_class(None, True, np.True_, 1.0, np.float32(1), "1", [1], np.array(1)),
    *wrong_value(2**70, -(2**70)),
    ARRAY,
]
WORD = [*wrong_class(3, True, np.float32(1), ["mean"], ()), *wrong_value("nope", "", "INT8"), ARRAY]
KERNEL = [*wrong_class(3, True, np.True_, ["cpu"], ("cpu",)), *wrong_value("nope", ""), ARRAY]
WINDOW = [
    *wrong_class(4, True, "ab", {1, 2}, 1.0, np.int64(3), np.array([1, 2])),
    *wrong_class((1.5, 0), (True, 0), (0, np.True_), (None, 0), ("a", 0)),
    *wrong_value((), (1,), (1, 2, 3), (-2, 0), [0, -2]),
    Wrong(lambda framework, good: (make(framework)(np.zeros((), np.int32)), 0), TypeError, "Array|rray|ensor"),
    ARRAY,
]
DTYPE = [*wrong_class(3, 3.5, True, [1]), *wrong_value("nope", "", "complex64", "int4"), ARRAY]
ROPE = [*wrong_class(3, "text", (1, 2), True), ARRAY]
NO_ARRAY = wrong_class("text", 3, 3.0, True, [1.0], (), {})
RANK_0 = Wrong(array((), None), ValueError, r"\(\)|\[\]")
COMPLEX = Wrong(array(None, "complex64"), TypeError, "complex64")
# The first array, which tells the framework, of any rank: of rows.
ROWS = [*NO_ARRAY, *NONE, COMPLEX, RANK_0]
FIRST = [*ROWS, Wrong(array((7,) * 5, None), ValueError, "7, 7, 7")]
FOREIGN = Wrong(foreign, TypeError, "ndarray|Tensor")


def others(dtype: str, *, optional: bool = False) -> list[Wrong]:
    """Wrong values for an array that is not the first, of `dtype`."""
    seven = Wrong(array((7,) * 5, dtype), ValueError, "7, 7, 7")
    return [*NO_ARRAY, FOREIGN, COMPLEX, seven, *([] if optional else NONE)]


SCALE = [wrong for wrong in others("float32", optional=True) if not isinstance(wrong.value, int | float)]
SCALE += [*wrong_class(True, np.True_, 1j), *wrong_value(float("nan"), np.float32("inf"), 10**400)]
LENGTHS = [
    *wrong_class("text", 3, 3.0, True, {3}, {}, np.int32(3), np.float32(3)),
    *(Wrong(x, TypeError, re.escape(repr(x[-1]))) for x in ([1, 1.5], [1, True], [1, "a"], [1, None], [1, np.True_])),
    Wrong([1, 2**40], ValueError, str(2**40)),
    Wrong([[1], [1, 2]], ValueError, "ragged"),
    Wrong(array((2,)), TypeError, "float32"),
    Wrong(array((2,), "bool"), TypeError, "bool"),
    Wrong(array((7, 7, 7), "int32"), ValueError, "7, 7, 7"),
    Wrong(array((), "int32"), ValueError, r"\(\)|\[\]"),
    Wrong(np.zeros(2, np.float32), TypeError, "float32|ndarray"),
]


# Operations ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A public call: a function of `make` that gives good arguments, and the wrong values of each of them.

    An argument may be a part of a value, `rope.cos`. Texts name it so, or by `spoken`.
    """

    op: str
    function: Callable[..., Any]
    good: Callable[[Callable[[Any], Any]], dict[str, Any]]
    wrong: dict[str, list[Wrong]]
    spoken: dict[str, str] = field(default_factory=dict)


Q = np.zeros((2, 6, 2, 16), np.float32)
PACKED = np.zeros((6, 2, 16), np.float32)
LSE = np.zeros((PACKED.shape[1], PACKED.shape[0]), np.float32)
OFFSETS = np.array([0, 2, 6], np.int32)
COS, SIN = qflash.rope_tables(6, 16)


def rope(make: Any, **positions: Any) -> qflash.Rope:
    return qflash.Rope(make(COS), make(SIN), **positions)


def quantized(make: Any) -> qflash.Quantized:
    scale = np.ones((2, 2, 1), np.float32)
    return qflash.Quantized(make(Q.astype(np.int8)), make(scale), granularity="group")


def kept(make: Any) -> qflash.QuantizedKV:
    parts = {name: make(np.zeros(shape, dtype)) for name, (dtype, shape) in results_of(2, 6, 2, 16, "int8_fp8").items()}
    lens = make(np.array([6, 6], np.int32))
    return qflash.QuantizedKV(**parts, lens=lens, dtype="float16", precision="int8_fp8")


X, W = np.zeros((2, 3, 4), np.float32), np.zeros((4, 5), np.float32)


def layer(make: Any) -> qflash.QuantizedLinear:
    return qflash.QuantizedLinear(make(np.zeros((5, 4), np.int8)), make(np.ones(5, np.float32)))


# A matrix of the first array's dtype, or what quantize_linear returned.
WEIGHT = [
    *others("float32"),
    Wrong(array((4,)), ValueError, r"\[4\]"),
    Wrong(array((6, 5)), ValueError, r"\[6, 5\]"),
    Wrong(array((4, 5), "float16"), TypeError, "float16"),
    Wrong(array((4, 5), "int8"), TypeError, "int8"),
]
SECOND_WEIGHT = [*WEIGHT, Wrong(array((4, 6)), ValueError, r"\[4, 6\]")]
BIAS = [
    *others("float32", optional=True),
    Wrong(array((6,)), ValueError, r"\[6\]"),
    Wrong(array((5,), "float16"), TypeError, "float16"),
]
RESIDUAL = [
    *others("float32", optional=True),
    Wrong(array((3, 5)), ValueError, r"\[3, 5\]"),
    Wrong(array((2, 3, 5), "float16"), TypeError, "float16"),
]
ENDS = {"residual": RESIDUAL, "precision": WORD, "out_dtype": [*DTYPE, *wrong_value("int32")], "kernel": KERNEL}
ROWS_OF_X = [*ROWS, Wrong(array((2, 3, 4), "int8"), TypeError, "int8")]
# Those of a weight that another framework's x is not multiplied with are not quantized by themselves, either.
VALUES = [*others("int8"), Wrong(array((5, 6), "int8"), ValueError, r"\[5, 6\]")]
PARTS = {"values": VALUES, "scale": [*others("float32"), Wrong(array(()), ValueError, r"\[\]")]}
SINKS = [
    *others("float32", optional=True),
    Wrong(array((3,)), ValueError, r"\[3\]"),
    Wrong(array((1, 2)), ValueError, r"\[1, 2\]"),
]
ROPE_PARTS = {"rope": ROPE, "rope.cos": others("float32"), "rope.sin": others("float32"), "rope.interleaved": FLAG}
OPTIONS = {
    "causal": FLAG, "window": WINDOW, "softcap": [*NUMBER, *wrong_value(-1.0)], "scale": NUMBER, "return_lse": FLAG,
    "precision": WORD, "kernel": KERNEL, "kv_lens": LENGTHS, "sinks": SINKS, "batch_invariant": FLAG,
}  # fmt: skip
POSITIONS = {"rope.positions_q": LENGTHS, "rope.positions_k": LENGTHS}
QUANTIZED = {"granularity": [*WORD, *NONE], "group": [*INT, *wrong_value(0)], "symmetric": FLAG}
INTERLEAVED = {"rope.interleaved": "interleaved"}

CASES = {
    "attention": Case(
        "attention",
        qflash.attention,
        lambda make: {"q": make(Q), "k": make(Q), "v": make(Q), "rope": rope(make), "scale": 1.0, "window": (1, 0)},
        {
            "q": FIRST, "k": others("float32"), "v": others("float32"), **OPTIONS, **ROPE_PARTS, **POSITIONS,
            "layout": [*WORD, *NONE],
        },
        INTERLEAVED,
    ),
    "attention without rope": Case(
        "attention",
        qflash.attention,
        lambda make: {"q": make(Q), "k": make(Q), "v": make(Q), "scale": 1.0, "window": (1, 0)},
        {"q": FIRST, "k": others("float32"), "v": others("float32"), **OPTIONS},
    ),
    "attention_varlen": Case(
        "attention",
        qflash.attention_varlen,
        lambda make: {
            "q": make(PACKED), "k": make(PACKED), "v": make(PACKED), "cu_seqlens_q": make(OFFSETS),
            "cu_seqlens_k": make(OFFSETS), "max_seqlen_q": 4, "max_seqlen_k": 4, "rope": rope(make),
        },
        {
            "q": FIRST, "k": others("float32"), "v": others("float32"), **OPTIONS, **ROPE_PARTS, **POSITIONS,
            "cu_seqlens_q": [*LENGTHS, *NONE], "cu_seqlens_k": [*LENGTHS, *NONE],
            "max_seqlen_q": INT, "max_seqlen_k": INT,
        },
        INTERLEAVED,
    ),
    "attention of Quantized": Case(
        "attention_quantized",
        qflash.attention,
        lambda make: {"q": quantized(make), "k": quantized(make), "v": quantized(make)},
        {
            "q": [*NO_ARRAY, *NONE, ARRAY], "k": [*NO_ARRAY, *NONE, ARRAY], "v": [*NO_ARRAY, *NONE],
            "q.values": FIRST, "k.values": others("int8"), "v.values": others("int8"),
            **{f"{x}.scale": others("float32") for x in "qkv"},
            **{f"{x}.{part}": wrong for x in "qkv" for part, wrong in QUANTIZED.items()},
            "k.mean": others("float32", optional=True),
            **{f"{x}.zero_point": [Wrong(array((), "int32"), ValueError, "given")] for x in "qkv"},
            "v.dtype": [*WORD, *NONE],
            **OPTIONS, "layout": [*WORD, *NONE], "rope": ROPE,
        },
    ),
    "attention of QuantizedKV": Case(
        "attention_kv",
        qflash.attention,
        lambda make: {"q": make(Q.astype(np.float16)), "k": kept(make), "rope": rope(make)},
        {
            "q": FIRST, "v": [*NO_ARRAY, ARRAY], **OPTIONS, **ROPE_PARTS, "rope.positions_q": LENGTHS,
            "k.precision": [*WORD, *NONE], "k.dtype": [*WORD, *NONE], "layout": [*WORD, *NONE],
            **{f"k.{part}": others(dtype) for part, (dtype, _) in results_of(2, 6, 2, 16, "int8_fp8").items()},
        },
        {**INTERLEAVED, "k": "kv"},
    ),
    "quantize_kv": Case(
        "quantize_kv",
        qflash.quantize_kv,
        lambda make: {"k": make(Q.astype(np.float16)), "v": make(Q.astype(np.float16)), "rope": rope(make)},
        {
            "k": FIRST, "v": others("float16"), "lens": LENGTHS, **ROPE_PARTS, "rope.positions_k": LENGTHS,
            "precision": [*WORD, *NONE], "rounding": [*WORD, *NONE], "seed": INT, "kernel": KERNEL,
        },
        INTERLEAVED,
    ),
    "softmax": Case(
        "softmax",
        qflash.softmax,
        lambda make: {"x": make(PACKED)},
        {"x": ROWS, "scale": [*NUMBER, *NONE], "kernel": KERNEL},
    ),
    "layer_norm": Case(
        "layer_norm",
        qflash.layer_norm,
        lambda make: {"x": make(PACKED)},
        {
            "x": ROWS, "weight": others("float32", optional=True), "bias": others("float32", optional=True),
            "eps": [*NUMBER, *NONE, *wrong_value(-1.0)], "return_stats": FLAG, "kernel": KERNEL,
        },
    ),
    "cross_entropy": Case(
        "cross_entropy",
        qflash.cross_entropy,
        lambda make: {"logits": make(PACKED), "targets": make(np.zeros((6, 2), np.int32))},
        {
            "logits": ROWS, "targets": others("int32"), "reduction": [*WORD, *NONE], "ignore_index": INT,
            "label_smoothing": [*NUMBER, *NONE, *wrong_value(1.5, -1)], "return_lse": FLAG, "kernel": KERNEL,
        },
    ),
    "quantize": Case(
        "quantize",
        qflash.quantize,
        lambda make: {"x": make(Q), "rope": rope(make)},
        {
            "x": FIRST, **QUANTIZED, "smooth": FLAG, "lens": LENGTHS, **ROPE_PARTS, "rope.positions_k": LENGTHS,
            "rounding": [*WORD, *NONE], "seed": INT, "kernel": KERNEL,
        },
        INTERLEAVED,
    ),
    "dequantize": Case(
        "dequantize",
        qflash.dequantize,
        lambda make: {"quantized": quantized(make)},
        {
            "quantized": [*NO_ARRAY, *NONE, ARRAY], "quantized.values": FIRST, "quantized.scale": others("float32"),
            "quantized.mean": others("float32", optional=True),
            "quantized.zero_point": [Wrong(array((), "int32"), ValueError, "given")],
            **{f"quantized.{part}": wrong for part, wrong in QUANTIZED.items()},
            "dtype": DTYPE, "kernel": KERNEL,
        },
    ),
    "merge": Case(
        "merge",
        qflash.merge,
        lambda make: {"out_a": make(PACKED), "lse_a": make(LSE), "out_b": make(PACKED), "lse_b": make(LSE)},
        {"out_a": FIRST, **{name: others("float32") for name in ("lse_a", "out_b", "lse_b")}, "kernel": KERNEL},
    ),
    "rope": Case(
        "rope",
        qflash.rope,
        lambda make: {"x": make(Q), "rope": rope(make)},
        {
            "x": FIRST, **ROPE_PARTS, "rope": [*ROPE, *NONE], "positions": LENGTHS, "rope.positions_k": LENGTHS,
            "kernel": KERNEL,
        },
        INTERLEAVED,
    ),
    "int8_matmul": Case(
        "int8_matmul",
        qflash.int8_matmul,
        lambda make: {"a": make(np.zeros((3, 4), np.int8)), "b": make(np.zeros((4, 5), np.int8))},
        {
            "a": ROWS, "b": others("int8"), "a_scale": SCALE, "b_scale": SCALE,
            "bias": others("float32", optional=True), "out_dtype": DTYPE, "kernel": KERNEL,
        },
    ),
    "linear": Case(
        "linear",
        qflash.linear,
        lambda make: {"x": make(X), "w": make(W)},
        {"x": ROWS_OF_X, "w": WEIGHT, "bias": BIAS, "activation": [*WORD, *wrong_value("swiglu", "relu")], **ENDS},
    ),
    "swiglu": Case(
        "swiglu",
        qflash.swiglu,
        lambda make: {"x": make(X), "gate": make(W), "up": make(W)},
        {"x": ROWS_OF_X, "gate": WEIGHT, "up": SECOND_WEIGHT, "gate_bias": BIAS, "up_bias": BIAS, **ENDS},
    ),
    "linear in INT8": Case(
        "linear_int8",
        qflash.linear,
        lambda make: {"x": make(X), "w": make(W), "precision": "int8"},
        {
            "x": ROWS_OF_X, "w": [wrong for wrong in WEIGHT if "float16" not in wrong.came], "bias": BIAS,
            "activation": WORD, **ENDS,
        },
    ),
    "linear of QuantizedLinear": Case(
        "linear_int8",
        qflash.linear,
        lambda make: {"x": make(X), "w": layer(make)},
        {"x": ROWS_OF_X, "bias": BIAS, **ENDS, **{f"w.{part}": wrong for part, wrong in PARTS.items()}},
    ),
    "swiglu of QuantizedLinear": Case(
        "swiglu_int8",
        qflash.swiglu,
        lambda make: {"x": make(X), "gate": layer(make), "up": layer(make)},
        {
            "x": ROWS_OF_X, "gate_bias": BIAS, "up_bias": BIAS, **ENDS,
            "up": [*NONE, Wrong(array((4, 5)), TypeError, "Array|ndarray|Tensor")],
            **{f"{w}.{part}": wrong for w in ("gate", "up") for part, wrong in PARTS.items()},
        },
    ),
    "quantize_linear": Case(
        "quantize_linear",
        qflash.quantize_linear,
        lambda make: {"w": make(W)},
        {"w": [*NO_ARRAY, *NONE, COMPLEX, RANK_0, Wrong(array((4,)), ValueError, r"\[4\]")]},
    ),
}  # fmt: skip


def call(case: Case, good: dict[str, Any], path: str, value: Any) -> Any:
    """The good call with one argument, or one part of it, changed."""
    argument, _, part = path.partition(".")
    return case.function(**{**good, argument: replace(good[argument], **{part: value}) if part else value})


def right_value(good: dict[str, Any], path: str) -> Any:
    argument, _, part = path.partition(".")
    return getattr(good[argument], part) if part else good.get(argument)


def spoken(case: Case, path: str) -> str:
    """A regular expression for the argument in texts.

    What is wrong with x.values may be said of x, and JAX's words for arrays among the words have the operation's names.
    """
    argument, _, part = path.partition(".")
    name = case.spoken.get(path) or f"{case.spoken.get(argument, argument)}.{part}".removesuffix(".")
    name = re.escape(name).replace(r"\.values", r"(\.values)?").replace(r"quantized\.", r"(quantized\.)?")
    return name.replace(r"\.gr", "[._]gr").replace(r"v\.dtype", "v[._]dtype")


# Tests ---------------------------------------------------------------------------------------------------------------

FRAMEWORKS = pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
ON_HOPPER_ALONE = ("attention_kv", "quantize_kv")


def test_every_operation_and_every_argument_is_in_the_table():
    elsewhere = {"attention_paged", "kv_write"}  # test_paged_errors.py, test_kv_write_errors.py
    # Nobody calls gradients by name, but those that are operations of their own.
    elsewhere |= {op.backward.name for op in OPS if op.gradient is not None and op.backward is not op}
    elsewhere |= {op.name for op in OPS if "_quantize_" in op.name}  # the first pass of linear and swiglu in INT8
    elsewhere.add("attention_backward_share")  # nor this one, of qflash.parallel
    assert {case.op for case in CASES.values()} == {op.name for op in OPS} - elsewhere
    for function in {case.function for case in CASES.values()}:
        tried = {path for case in CASES.values() if case.function is function for path in case.wrong}
        assert tried >= set(inspect.signature(function).parameters)


@FRAMEWORKS
@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str, framework: str):
    case = CASES[name]
    good = case.good(make(framework))
    if case.op in ON_HOPPER_ALONE:
        with pytest.raises(qflash.NoKernelError, match="no kernel serves"):
            case.function(**good)
    else:
        case.function(**good)  # a plan that a wrong value must not find
    failures = []
    for path, values in case.wrong.items():
        for wrong in values:
            value = wrong.of(framework, right_value(good, path))
            what = f"{path}={' '.join(repr(value).split()):.60}"
            try:
                call(case, good, path, value)
            except Exception as error:  # whatever it is, the table says what it should be
                grammar = rf"{spoken(case, path)} .*({wrong.came}).*allowed.*: ."
                if type(error) is not wrong.error or not re.match(grammar, str(error), re.DOTALL):
                    failures.append(f"{what} is {type(error).__name__}, not {wrong.error.__name__}: {error!s:.200}")
            else:
                failures.append(f"{what} is taken")
    assert not failures, "\n".join([f"{len(failures)} of {name} in {framework}:", *failures])


@pytest.mark.parametrize("name", CASES)
def test_another_device(name: str):
    """Of the front ends, PyTorch has a second device on every machine."""
    case = CASES[name]
    good = case.good(make("torch"))
    for path, values in case.wrong.items():
        if FOREIGN in values and right_value(good, path) is not None:
            with pytest.raises(ValueError, match=rf"^{spoken(case, path)} is on meta; allowed: .* device, cpu"):
                call(case, good, path, right_value(good, path).to("meta"))


@FRAMEWORKS
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_of_another_device(name: str, framework: str):
    case = CASES[name]
    if "kernel" not in inspect.signature(case.function).parameters:
        return
    op = case.op if case.op == "quantize_kv" else case.op.removesuffix("_kv").removesuffix("_quantized")
    op = next((known.computed_as for known in OPS if known.name == op), op)
    kernel = kernels_of(op, "cuda")[0].name
    with pytest.raises(
        qflash.NoKernelError, match=rf"kernel '{kernel}' cannot serve .*runs on cuda, the arrays are on"
    ):
        case.function(**case.good(make(framework)), kernel=kernel)
