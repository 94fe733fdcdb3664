"""Prefill on pages, run on the CPU: `fa_mma` and `sm90_fwd` on K and V in the pages of a cache, 16-bit and INT8.

A pool is three times as large as it must be, its pages are shuffled, and every slot without a token holds NaN
(qflash/testing/paged.py).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from qflash import reference
from qflash.dispatch import VARIANTS
from qflash.reference import kv_write
from qflash.testing import Case
from qflash.testing.case import Rotary
from qflash.testing.compare import check_contract, check_same_bits, errors
from qflash.testing.emulated_attention import UNTOUCHED, check_kernel
from qflash.testing.emulator import ARCH
from qflash.testing.paged import PAGE_SIZES, POOLS, PagedInputs, on_pages, plan_of

KERNELS = ("fa_mma", "sm90_fwd")
HEAD_DIMS = {64: "float16", 80: "bfloat16", 128: "bfloat16", 256: "float16"}
MASKS = {
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "softcap": {"softcap": 15.0},
    "rope": {"causal": True, "rope": Rotary(48)},
}
# 130 queries and more are several rows of every tile; the second sequence is a chunk of a long one's prefill.
PADDED = {"q_len": 70, "k_len": 300, "batch": 2, "kv_lens": (300, 190)}
PACKED = {"q_lens": (130, 0, 40, 1), "k_lens": (130, 20, 290, 33)}


def case_of(head_dim: int, mask: str, packed: bool, page_size: int, pool: str = "phtd") -> Case:
    seed = PAGE_SIZES.index(page_size) + len(PAGE_SIZES) * POOLS.index(pool)  # how on_pages takes its turns
    shape = PACKED if packed else PADDED
    name = f"{head_dim}_{mask}_{'packed' if packed else 'padded'}_{page_size}"
    return Case(
        name, q_heads=2, kv_heads=1, head_dim=head_dim, dtype=HEAD_DIMS[head_dim], seed=seed, **shape, **MASKS[mask]
    )


def run(library, kernel: str, case: Case, inputs: PagedInputs, arch: int = ARCH, seed: int = 1):
    """(out, lse) of a variant on pages as they are."""
    plan, arrays = plan_of(case, inputs, kernel, "cpu")
    results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
    compiled = library(kernel, case.dtype, case.head_dim, arch)
    operands = [arrays[operand.argument] for operand in plan.operands]
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), [*operands, *results], seed)
    return results[0], results[1]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_contract(library, kernel, page_size, head_dim):
    """Every page size with every head_dim, packed and padded; masks and the ways that pools lie in memory by turns."""
    turn = PAGE_SIZES.index(page_size) + list(HEAD_DIMS).index(head_dim)
    for packed in (True, False):
        mask = list(MASKS)[(2 * turn + packed + page_size // 64) % len(MASKS)]
        check_kernel(library, case_of(head_dim, mask, packed, page_size, POOLS[turn % len(POOLS)]), f"{kernel}_pages")


@pytest.mark.parametrize(
    ("head_dim", "arch"),
    [(64, 75), (256, 80), *(pytest.param(*tile, marks=pytest.mark.slow) for tile in ((64, 80), (256, 75)))],
)
def test_tiles_of_older_gpus(library, head_dim, arch):
    for page_size, packed in ((16, True), (128, False)):
        case = replace(case_of(head_dim, "rope", packed, page_size), dtype="float16")
        check_kernel(library, case, "fa_mma_pages", arch)


@pytest.mark.parametrize("kernel", KERNELS)
def test_entries_that_no_row_needs_are_not_followed(library, kernel):
    """A window hides the first pages of every row: what the table says of them may be anything."""
    for packed in (False, True):
        case = replace(case_of(64, "window", packed, 16), window=(30, 0))
        inputs = on_pages(case, case.make_inputs())
        want = run(library, f"{kernel}_pages", case, inputs)
        check_contract(case, *want)
        table, lens = inputs.kv.page_table.copy(), inputs.kv.lens
        lens_q = case.q_lens if packed else (case.q_len,) * case.batch
        hidden = [max(0, int(n) - len_q - 30) // 16 for n, len_q in zip(lens, lens_q, strict=True)]
        assert max(hidden) > 2
        for row, columns, value in zip(table, hidden, (-1, 2**31 - 1, 2**30, -(2**31)), strict=False):
            row[:columns] = value
        got = run(library, f"{kernel}_pages", case, replace(inputs, kv=replace(inputs.kv, page_table=table)))
        check_same_bits(case, want, got)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [-1, "pages", 2**31 - 1])
def test_a_missing_page_makes_its_sequence_nan(library, kernel, value):
    """Every row of the sequence, whichever page it is, and no row of the others."""
    for packed, column in product((False, True), (0, 7)):
        case = case_of(64, "causal", packed, 16)
        inputs = on_pages(case, case.make_inputs())
        want = run(library, f"{kernel}_pages", case, inputs)
        table = inputs.kv.page_table.copy()
        table[0, column] = inputs.kv.pages if value == "pages" else value
        got = run(library, f"{kernel}_pages", case, replace(inputs, kv=replace(inputs.kv, page_table=table)))
        bad = slice(0, 130) if packed else 0
        of_lse = (slice(None), bad) if packed else bad
        assert np.isnan(got[0][bad].astype(np.float32)).all() and np.isnan(got[1][of_lse]).all()
        for out, lse in (want, got):
            out[bad], lse[of_lse] = 0, 0
        check_same_bits(case, want, got)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [-1, "columns"])
def test_a_length_out_of_range_makes_its_sequence_nan(library, kernel, length):
    case = case_of(64, "causal", False, 32)
    inputs = on_pages(case, case.make_inputs())
    lens = inputs.kv.lens.copy()
    lens[1] = inputs.kv.page_table.shape[1] * 32 + 1 if length == "columns" else length
    want = run(library, f"{kernel}_pages", case, inputs)
    got = run(library, f"{kernel}_pages", case, replace(inputs, kv=replace(inputs.kv, lens=lens)))
    assert np.isnan(got[0][1].astype(np.float32)).all() and np.isnan(got[1][1]).all()
    check_same_bits(case, tuple(x[0] for x in want), tuple(x[0] for x in got))


@pytest.mark.parametrize("kernel", KERNELS)
def test_sequences_share_pages(library, kernel):
    """Sequences whose first pages are the same ones give what they give with pages of their own."""
    case = Case("prefix", 70, 200, 2, 1, 64, batch=3, causal=True, dtype="float16", seed=0)
    made = case.make_inputs()
    made.k[1:, :160], made.v[1:, :160] = made.k[0, :160], made.v[0, :160]
    inputs = on_pages(case, made)
    want = run(library, f"{kernel}_pages", case, inputs)
    table = inputs.kv.page_table.copy()
    table[1:, : 160 // 16] = table[0, : 160 // 16]
    got = run(library, f"{kernel}_pages", case, replace(inputs, kv=replace(inputs.kv, page_table=table)))
    check_same_bits(case, want, got)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("how", ["strides", "address", "values alone"])
def test_pools_of_odd_strides(library, kernel, how):
    """Tokens that begin at no whole 16 bytes, which the copy engine cannot fetch."""
    for packed in (False, True):
        case = case_of(64, "window", packed, 32)
        inputs = on_pages(case, case.make_inputs())

        def oddly(pool: np.ndarray) -> np.ndarray:
            if how == "strides":
                room = np.full((*pool.shape[:-1], pool.shape[-1] + 3), np.nan, pool.dtype)
                odd = room[..., : pool.shape[-1]]
            else:
                odd = np.full(pool.size + 1, np.nan, pool.dtype)[1:].reshape(pool.shape)
            odd[...] = pool
            return odd

        k_pages = inputs.kv.k_pages if how == "values alone" else oddly(inputs.kv.k_pages)
        kv = replace(inputs.kv, k_pages=k_pages, v_pages=oddly(inputs.kv.v_pages))
        check_contract(case, *run(library, f"{kernel}_pages", case, replace(inputs, kv=kv)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", [48, 80, 512])
def test_other_page_sizes(library, kernel, page_size):
    """Any multiple of 16 is served, a power of two or not."""
    for head_dim, packed in ((64, True), (128, False)):
        case = case_of(head_dim, "window", packed, 16)
        inputs = on_pages(case, case.make_inputs(), page_size=page_size)
        check_contract(case, *run(library, f"{kernel}_pages", case, inputs))


# INT8 ---------------------------------------------------------------------------------------------------------------


def in_int8(inputs: PagedInputs, mean: bool) -> PagedInputs:
    """The pool as kv_write leaves it. Slots without a token have scales of NaN."""
    kv = inputs.kv
    heads = 1 if kv.layout == "phtd" else 2

    def tokens(pool: np.ndarray) -> np.ndarray:  # [pages, page_size, heads, head_dim]
        return np.moveaxis(pool, heads, 2).astype(np.float32)

    k, v = tokens(kv.k_pages), tokens(kv.v_pages)
    k_mean = np.nanmean(np.where(np.isfinite(k), k, np.nan), axis=(0, 1)).astype(np.float32) if mean else None
    k_values, k_scale = kv_write.quantize_tokens(kv_write.mixed_keys(k, k_mean))
    v_values, v_scale = kv_write.quantize_tokens(v)
    pools = (np.ascontiguousarray(np.moveaxis(x, 2, heads)) for x in (k_values, v_values))
    scales = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k_scale, v_scale))
    quantized = replace(kv, **dict(zip(("k_pages", "v_pages", "k_scale", "v_scale"), (*pools, *scales), strict=True)))
    return replace(inputs, kv=replace(quantized, k_mean=k_mean))


def dequantized(case: Case, inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of the integers, in float64, a sequence after another."""
    kv = inputs.kv
    heads = 1 if kv.layout == "phtd" else 2
    scale = [x.swapaxes(1, 2) for x in (kv.k_scale, kv.v_scale)]
    k = kv_write.dequantize_keys(np.moveaxis(kv.k_pages, heads, 2), scale[0], kv.k_mean)
    v = np.moveaxis(kv.v_pages, heads, 2).astype(np.float64) * scale[1][..., None]
    parts = []
    for b, length in enumerate(kv.lens):
        entries = kv.page_table[b, : -(-int(length) // kv.page_size)]
        q = inputs.q[b] if not case.packed else inputs.q[slice(*inputs.cu_seqlens_q[b : b + 2])]
        q = q.astype(np.float64)
        if inputs.rope is not None and len(q):
            positions = np.arange(len(q)) + int(length) - len(q)
            q = reference.apply_rope(q, positions, inputs.rope).astype(case.dtype).astype(np.float64)
        rows = (x[entries].reshape(-1, *x.shape[2:])[:length] for x in (k, v))
        parts.append(reference.attention(q[None], *(x[None] for x in rows), **case.options()))
    if case.packed:
        return np.concatenate([x[0][0] for x in parts]), np.concatenate([x[1][0] for x in parts], -1)
    return np.concatenate([x[0] for x in parts]), np.concatenate([x[1] for x in parts])


# What rounding k, the weights and out to 16 bits costs: half a unit in the last place, 2^-11 and 2^-8, four times.
ROUNDING = {"float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-9}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_int8_is_what_its_integers_say(library, kernel, page_size):
    turn = PAGE_SIZES.index(page_size)
    for i, head_dim in enumerate((64, 80, 128)):
        case = case_of(head_dim, list(MASKS)[(turn + i) % 4], (turn + i) % 2 == 0, page_size, POOLS[i % 2])
        inputs = in_int8(on_pages(case, case.make_inputs()), mean=turn % 2 == 0)
        out, lse = run(library, f"{kernel}_pages_int8", case, inputs)
        want = dequantized(case, inputs)
        assert (np.isfinite(lse) == np.isfinite(want[1])).all() and np.isfinite(out.astype(np.float32)).all()
        assert errors(out, want[0]).relative_l2 < ROUNDING[case.dtype], case.name
        seen = np.isfinite(lse)
        assert np.abs(lse - want[1])[seen].max() < 8 * ROUNDING[case.dtype], case.name
        check_same_bits(case, (out, lse), run(library, f"{kernel}_pages_int8", case, inputs, seed=2))


@pytest.mark.parametrize("kernel", KERNELS)
def test_int8_tokens_that_are_not_finite(library, kernel):
    """A scale of NaN is NaN in the rows that see its token, and in no other."""
    case = case_of(64, "causal", False, 32)
    inputs = in_int8(on_pages(case, case.make_inputs()), True)
    page = inputs.kv.page_table[0, 8]  # tokens 256 .. 287 of 300, whose queries are 230 .. 299
    for name in ("k_scale", "v_scale"):
        scale = getattr(inputs.kv, name).copy()
        scale[page, 0, 4] = np.nan  # token 260
        out, _ = run(library, f"{kernel}_pages_int8", case, replace(inputs, kv=replace(inputs.kv, **{name: scale})))
        nan = np.isnan(out.astype(np.float32))
        assert nan[0, 30:].all() and nan.sum() == nan[0, 30:].size


@pytest.mark.parametrize("kernel", KERNELS)
def test_int8_with_a_missing_page(library, kernel):
    for packed in (False, True):
        case = case_of(64, "causal", packed, 16)
        inputs = in_int8(on_pages(case, case.make_inputs()), True)
        table = inputs.kv.page_table.copy()
        table[0, 3] = inputs.kv.pages
        got, _ = run(library, f"{kernel}_pages_int8", case, replace(inputs, kv=replace(inputs.kv, page_table=table)))
        nan = np.isnan(got.astype(np.float32))
        bad = nan[:130] if packed else nan[0]
        assert bad.all() and nan.sum() == bad.size


@pytest.mark.parametrize("kernel", KERNELS)
def test_int8_pools_of_odd_strides(library, kernel):
    case = case_of(80, "window", False, 32)
    inputs = in_int8(on_pages(case, case.make_inputs()), True)

    def oddly(pool: np.ndarray) -> np.ndarray:
        odd = np.zeros((*pool.shape[:-1], pool.shape[-1] + 3), pool.dtype)[..., : pool.shape[-1]]
        odd[...] = pool
        return odd

    parts = {name: oddly(getattr(inputs.kv, name)) for name in ("k_pages", "v_pages", "k_scale", "v_scale")}
    want = run(library, f"{kernel}_pages_int8", case, inputs)
    odd = replace(inputs, kv=replace(inputs.kv, **parts))
    check_same_bits(case, want, run(library, f"{kernel}_pages_int8", case, odd))
