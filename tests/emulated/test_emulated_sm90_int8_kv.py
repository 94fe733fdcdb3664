"""Attention on what `quantize_kv` left, on the emulator (test_emulated_sm90_int8.py): the same bits as when attention
quantizes by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import NoKernelError
from qflash.call.op import Op
from qflash.dispatch import VARIANTS
from qflash.frontends.numpy import describe
from qflash.ops.attention_kv import ATTENTION_KEPT
from qflash.ops.kv import KV_FIELDS, QUANTIZE_KV
from qflash.testing import Case
from qflash.testing.case import Inputs, Rotary
from qflash.testing.compare import check_same_bits
from qflash.testing.emulated_attention import run_case
from qflash.testing.emulator import Library, poisoned

pytestmark = pytest.mark.parametrize("precision", ["int8", "int8_fp8"])


class Call:
    """An operation of one array each, as a front end would carry it out on the emulator."""

    def __init__(self, library: Library, kernel: str, op: Op, arrays: tuple, words: tuple, change=()):
        described = [None if x is None else describe(name, x) for name, x in zip(op.arrays, arrays, strict=True)]
        self.plan = op.plan(*described, *words)
        self.plan = replace(self.plan, fields=tuple({**dict(self.plan.fields), **dict(change)}.items()))
        self.library, self.prepared = library, library.prepare(self.plan, VARIANTS[kernel])
        given = dict(zip(op.arrays, arrays, strict=True))
        self.operands = {operand.field: np.ascontiguousarray(given[operand.argument]) for operand in self.plan.operands}
        self.workspace = poisoned(self.prepared.workspace_bytes)

    def run(self, seed: int = 0, without: str | None = None) -> dict[str, np.ndarray]:
        """Results by their fields. without: an operand whose address is not told."""
        results = {}
        for result in self.plan.results:
            results[result.field] = np.full(result.shape, 77, result.dtype)
        arrays = [None if field == without else x for field, x in (self.operands | results).items()]
        self.library.launch(self.prepared, arrays, seed, workspace=self.workspace)
        return results


def quantized(library, case: Case, inputs: Inputs, precision: str) -> dict[str, np.ndarray | None]:
    """By the names of ATTENTION_KEPT's arrays."""
    rope = inputs.rope
    tables = (None,) * 3 if rope is None else (rope.cos, rope.sin, rope.positions_k)
    words = (precision, "nearest", 0, rope is not None and rope.interleaved, None)
    handle = library("sm90_quantize", case.dtype, case.head_dim)
    call = Call(handle, "sm90_quantize", QUANTIZE_KV, (inputs.k, inputs.v, inputs.kv_lens, *tables), words)
    found = call.run(seed=1)
    return {"kv.v": inputs.v, **{f"kv.{name}": found[field] for name, field in KV_FIELDS.items() if field in found}}


def attention(library, case: Case, inputs: Inputs, precision: str, change=()) -> Call:
    kept = quantized(library, case, inputs, precision)
    rope = inputs.rope
    tables = (None,) * 3 if rope is None else (rope.cos, rope.sin, rope.positions_q)
    arrays = (
        inputs.q,
        *(kept.get(name) for name in ATTENTION_KEPT.arrays[1:10]),
        inputs.kv_lens,
        *tables,
        inputs.sinks,
    )
    words = (precision, case.dtype, case.causal, case.window, case.softcap, case.scale, None, None, False)
    words += (True, rope is not None and rope.interleaved)
    kernel = f"sm90_{precision}_kv"
    return Call(library(kernel, case.dtype, case.head_dim), kernel, ATTENTION_KEPT, arrays, words, change)


CASES = {
    "heads": Case("heads", 70, 300, 4, 2, causal=True),
    "padding": Case("padding", 50, 200, 2, 1, batch=3, kv_lens=(0, 200, 77), window=(60, 20)),
    "softcap": Case("softcap", 64, 130, softcap=5.0),
    "rope": Case("rope", 60, 150, causal=True, rope=Rotary(32)),
    "sinks": Case("sinks", 60, 150, 4, 2, causal=True, sinks=("0.5", "-1.25", "3")),
    "no keys": Case("no keys", 130, 20, batch=2, kv_lens=(0, 0)),
    "not finite": Case(
        "not finite", 70, 300, causal=True,
        plant=(("k", (0, 280, 0, 3), "nan"), ("v", (0, 290, 1, 3), "inf"), ("v", (0, 240, 0, 9), "nan")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, "float16"), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in ((72, "bfloat16"), (256, "float16")))],
)
def test_same_bits_as_in_one_go(library, precision, name, head_dim, dtype):
    case = replace(CASES[name], head_dim=head_dim, dtype=dtype, seed=4)
    found = attention(library, case, case.make_inputs(), precision).run(seed=2)
    wanted = run_case(library, case, f"sm90_{precision}", seed=3)
    check_same_bits(case, (found["out.data"], found["lse"]), wanted)


def test_queries_are_found_where_the_call_before_left_them(library, precision):
    """When no address of q comes: so the attention is timed alone."""
    case = Case("again", 300, 330, 4, 2, 64, dtype="float16", causal=True)
    call = attention(library, case, case.make_inputs(), precision)
    wanted = call.run(seed=1)
    found = call.run(seed=2, without="q.data")
    for field in ("out.data", "lse"):
        assert np.isfinite(wanted[field]).all() and np.array_equal(found[field], wanted[field])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", 0),
        ("kv.kind", 0),  # its k is int8
        ("kv.kind", 1),
        ("kv.kind", 3),
        ("kv.k_dtype", 1),
        ("kv.v_dtype", 3),
        ("kv.k.stride_h", 80),
        ("kv.k_scales.group", 128),
        ("kv.page_size", 16),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused(library, precision, field, value):
    """By the C entry too: a stored program may come past the front ends."""
    case = Case("refused", 20, 70, 4, 2, 64, dtype="float16")
    call = attention(library, case, case.make_inputs(), precision, change={field: value})
    with pytest.raises(NoKernelError):
        call.run()
