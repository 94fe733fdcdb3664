"""Pools of more elements than 31 bits count, of which nearly all is a hole in a file: pages are found by 64 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qflash.call.array import Array
from qflash.dispatch import VARIANTS
from qflash.frontends import numpy as numpy_frontend
from qflash.ops.kv_write import KV_WRITE
from qflash.ops.paged import PagedKV, arrays_of
from qflash.testing import Case
from qflash.testing.compare import check_same_bits
from qflash.testing.emulated_attention import UNTOUCHED
from qflash.testing.paged import PagedInputs, on_pages, plan_of

APART = 1 << 27  # elements from page to page
CASE = Case("far", 2, 150, 4, 2, 64, dtype="float16", causal=True, batch=2, kv_lens=(150, 67), seed=1)
KERNELS = [f"{kernel}_pages" for kernel in ("sm90_decode", "decode", "sm90_fwd", "fa_mma")]
KERNELS += ["sm90_decode_pages_int8", "decode_pages_int8"]


def apart(pool: np.ndarray, file: Path) -> np.ndarray:
    """The pool with its pages APART."""
    room = np.memmap(file, pool.dtype, "w+", shape=(APART * len(pool),)).view(np.ndarray)
    pages = np.lib.stride_tricks.as_strided(room, pool.shape, (APART * pool.itemsize, *pool.strides[1:]))
    pages[...] = pool
    return pages


def with_far_pages(kv: PagedKV, folder: Path) -> PagedKV:
    far = replace(kv, k_pages=apart(kv.k_pages, folder / "k"), v_pages=apart(kv.v_pages, folder / "v"))
    used = [row[: -(-int(n) // kv.page_size)] for row, n in zip(kv.page_table, kv.lens, strict=True)]
    assert int(np.concatenate(used).max()) * APART > 2**32
    return far


def attend(library, kernel: str, inputs: PagedInputs) -> list[np.ndarray]:
    plan, arrays = plan_of(CASE, inputs, kernel, "cpu")
    results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
    compiled = library(kernel, CASE.dtype, CASE.head_dim)
    operands = (arrays[operand.argument] for operand in plan.operands)
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, *results))
    return results


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention(library, kernel, tmp_path):
    inputs = on_pages(CASE, CASE.make_inputs(), kernel, 16, "phtd")
    far = replace(inputs, kv=with_far_pages(inputs.kv, tmp_path))
    check_same_bits(CASE, attend(library, kernel, inputs), attend(library, kernel, far), "")


@pytest.mark.parametrize("variant", ["pages", "pages_int8"])
def test_kv_write(library, variant, tmp_path):
    near = on_pages(CASE, CASE.make_inputs(), f"decode_{variant}", 16, "phtd").kv
    far = with_far_pages(near, tmp_path)
    near, far = (
        replace(kv, **{name: x.copy() for name in ("k_scale", "v_scale") if (x := getattr(kv, name)) is not None})
        for kv in (near, far)
    )
    k, v = np.random.default_rng(0).standard_normal((2, 2, 60, 2, 64), np.float32).astype(np.float16)
    before = near.k_pages.copy()
    for kv in (near, far):
        named = dict(zip(KV_WRITE.arrays, (k, v, *arrays_of(kv)), strict=False))
        given = {name: numpy_frontend.describe(name, x) for name, x in named.items() if x is not None}
        described = {name: Array(x.shape, x.strides, x.dtype, "cpu") for name, x in given.items()}
        plan = KV_WRITE.plan(*(described.get(name) for name in KV_WRITE.arrays), kv.layout, False, None)
        compiled = library(f"kv_write_{variant}", "float16")
        prepared = compiled.prepare(plan, VARIANTS[f"kv_write_{variant}"])
        compiled.launch(prepared, [named[operand.argument] for operand in plan.operands])
    assert (near.k_pages != before).any()
    for x, y in zip(arrays_of(near), arrays_of(far), strict=True):
        if x is not None:
            np.testing.assert_array_equal(x, y)
