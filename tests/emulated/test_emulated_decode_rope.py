"""`sm90_decode` rotates q in the warp that loads it, for K and V of every kind: run on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import Rope
from qflash.dispatch import VARIANTS
from qflash.testing import Case, kept, paged
from qflash.testing.case import Rotary
from qflash.testing.compare import check_same_bits
from qflash.testing.emulated_attention import UNTOUCHED, call, check_kernel
from qflash.testing.runner import problem_of

ARRAYS, KEPT = "sm90_decode", "sm90_decode_kv"
KERNELS = (ARRAYS, "sm90_decode_pages", "sm90_decode_pages_int8", KEPT)

# Halves of whole chunks, of the row and of a part of it; halves that begin within a chunk, and within four channels.
ROPES = (
    Rotary(128), Rotary(64), Rotary(48), Rotary(24), Rotary(10), Rotary(128, interleaved=True),
    Rotary(22, interleaved=True), Rotary(128, positions="shared"), Rotary(64, positions="negative"),
    Rotary(32, interleaved=True, positions="per_batch"),
)  # fmt: skip
CASE = Case("rope", 2, 200, 8, 2, 128, dtype="bfloat16", causal=True, batch=3, kv_lens=(200, 67, 0), seed=5)


@pytest.fixture(params=KERNELS)
def kernel(request) -> str:
    return request.param


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_rope(library, kernel, rope):
    check_kernel(library, replace(CASE, rope=rope), kernel)


@pytest.mark.parametrize(("head_dim", "q_heads", "q_len"), [(64, 8, 1), (64, 16, 8), (80, 6, 4), (256, 8, 3)])
def test_shapes(library, kernel, head_dim, q_heads, q_len):
    """Rows for one, two and four warps, and channels past the last."""
    shape = {"head_dim": head_dim, "q_heads": q_heads, "q_len": q_len, "dtype": "float16"}
    for rope in (Rotary(64), Rotary(head_dim, interleaved=True)):
        check_kernel(library, replace(CASE, rope=rope, **shape), kernel)


def run(library, kernel: str, case: Case, q: np.ndarray, rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) with other queries and another rope for them than K of the case has."""
    inputs = case.make_inputs()
    compiled = library(kernel, case.dtype, case.head_dim)
    if kernel == ARRAYS:
        problem = problem_of(case, replace(inputs, q=q, rope=rope), None, "cpu")
        return call(compiled, kernel, problem, q, inputs.k, inputs.v, inputs.kv_lens, rope=rope)
    rope = replace(rope, positions_k=None)  # K was rotated before
    if kernel == KEPT:
        plan, arrays = kept.plan_of(case, replace(kept.on_kept(case, inputs), q=q, rope=rope), kernel, "cpu")
    else:
        on_pages = paged.on_pages(case, inputs, kernel)
        plan, arrays = paged.plan_of(case, replace(on_pages, q=q, rope=rope), kernel, "cpu")
    out, lse = (np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results)
    operands = (arrays[operand.argument] for operand in plan.operands)
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, out, lse))
    return out, lse


def at_odd_address(x: np.ndarray) -> np.ndarray:
    memory = np.empty(x.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + x.itemsize
    odd = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    odd[...] = x
    return odd


@pytest.mark.parametrize(
    "rope", [Rotary(128), Rotary(64, positions="per_batch"), Rotary(64, interleaved=True)], ids=str
)
def test_at_odd_addresses(library, kernel, rope):
    """Rows of q and tables that begin at no whole 16 bytes are read one by one, and give the same bits."""
    case = replace(CASE, rope=rope)
    inputs = case.make_inputs()
    rope = inputs.rope
    wider = np.full((*inputs.q.shape[:-1], 131), np.nan, inputs.q.dtype)
    wider[..., 1:129] = inputs.q
    odd = replace(rope, cos=at_odd_address(rope.cos), sin=at_odd_address(rope.sin))
    wanted = run(library, kernel, case, inputs.q, rope)
    for q, tables in ((wider[..., 1:129], rope), (inputs.q, odd), (wider[..., 1:129], odd)):
        check_same_bits(case, wanted, run(library, kernel, case, q, tables))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kernel", KERNELS[1:])  # keys of arrays are rotated by the same table
def test_positions_past_the_table(library, kernel, interleaved):
    """Rows there are NaN; others have the bits that they have with a longer table, down to its last row."""
    case = replace(CASE, rope=Rotary(64, interleaved, positions="per_batch"), kv_lens=(200, 67, 5))
    inputs = case.make_inputs()
    rows = 40
    for last in (rows, -rows, 2**31 - 1, -(2**31)):
        inside = replace(inputs.rope, positions_q=np.array([[3, 5], [rows - 1, 7], [-rows + 1, 0]], np.int32))
        past = replace(inside, cos=inside.cos[:rows], sin=inside.sin[:rows], positions_q=inside.positions_q.copy())
        past.positions_q[:, 1] = last
        wanted = run(library, kernel, case, inputs.q, inside)
        found = run(library, kernel, case, inputs.q, past)
        assert np.isnan(found[0][:, 1].astype(np.float32)).all() and np.isfinite(wanted[0].astype(np.float32)).all()
        np.testing.assert_array_equal(found[0][:, 0], wanted[0][:, 0])
