"""Rows of a batch that no sequence has, as a CUDA graph replays them: length 0, no pages, whatever tokens hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import PagedKV
from qflash.dispatch import VARIANTS
from qflash.testing import Case, Rotary
from qflash.testing.emulated_attention import UNTOUCHED
from qflash.testing.paged import PagedInputs, on_pages, plan_of

KERNELS = ("decode_pages", "sm90_decode_pages", "sm90_decode_pages_int8", "fa_mma_pages", "sm90_fwd_pages")
PADDING = Case("padding", 1, 140, 4, 2, 64, dtype="float16", causal=True, batch=4, kv_lens=(140, 0, 33, 0))


def run(library, kernel: str, case: Case, inputs) -> list[np.ndarray]:
    """Arrays without elements have no address, as in PyTorch."""
    plan, arrays = plan_of(case, inputs, kernel, "cpu")
    results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
    compiled = library(kernel, case.dtype, case.head_dim, 90)
    operands = (x if x.size else None for x in (arrays[operand.argument] for operand in plan.operands))
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, *results), 0)
    return results


@pytest.mark.parametrize("rope", [None, Rotary(64)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_gives_padding_zeros(library, kernel, rope):
    """Queries of padding may be NaN, its pages anything, and the other rows keep their bits."""
    case = replace(PADDING, rope=rope)
    inputs = on_pages(case, case.make_inputs(), kernel, 32, "phtd")
    inputs.kv.page_table[1] = -1
    out, lse = run(library, kernel, case, inputs)
    inputs.q[1::2] = np.nan
    spoiled, spoiled_lse = run(library, kernel, case, inputs)
    for found, found_lse in ((out, lse), (spoiled, spoiled_lse)):
        assert (found[1::2] == 0).all() and np.isneginf(found_lse[1::2]).all()
    np.testing.assert_array_equal(spoiled[::2], out[::2])
    np.testing.assert_array_equal(spoiled_lse[::2], lse[::2])
    assert np.isfinite(out[::2].astype(np.float32)).all() and np.isfinite(lse[::2]).all()


@pytest.mark.parametrize(("pages", "columns"), [(0, 0), (3, 0), (0, 1)])
@pytest.mark.parametrize("kernel", (*KERNELS, "fa_mma_pages_int8", "sm90_fwd_pages_int8"))
def test_pools_and_tables_of_nothing(library, kernel, pages, columns):
    int8 = kernel.endswith("int8")
    pools = (np.zeros((pages, 2, 16, 64), np.int8 if int8 else np.float16) for _ in "kv")
    scales = (np.zeros((pages, 2, 16), np.float32) for _ in "kv" if int8)
    kv = PagedKV(*pools, np.full((4, columns), -1, np.int32), np.zeros(4, np.int32), *scales)
    case = replace(PADDING, q_len=40 if "fwd" in kernel or "mma" in kernel else 2)
    out, lse = run(library, kernel, case, PagedInputs(case.make_inputs().q, kv))
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("kernel", ["fa_mma_pages", "sm90_fwd_pages", "fa_mma_pages_int8", "sm90_fwd_pages_int8"])
def test_packed_queries_of_no_sequence_are_nan(library, kernel):
    int8 = kernel.endswith("int8")
    pools = (np.zeros((3, 2, 16, 64), np.int8 if int8 else np.float16) for _ in "kv")
    scales = (np.zeros((3, 2, 16), np.float32) for _ in "kv" if int8)
    kv = PagedKV(*pools, np.zeros((0, 2), np.int32), np.zeros(0, np.int32), *scales)
    q = np.ones((5, 4, 64), np.float16)
    out, lse = run(library, kernel, PADDING, PagedInputs(q, kv, None, np.zeros(1, np.int32), 5))
    assert np.isnan(out).all() and np.isnan(lse).all()
