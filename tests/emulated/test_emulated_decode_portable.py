"""What `decode` has beside `sm90_decode`: tile shapes of every architecture, tiles that pass through registers, rope as
tiles are copied, pages of any size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash import NoKernelError
from qflash.dispatch import VARIANTS
from qflash.testing import BY_NAME, Case, Rotary
from qflash.testing.compare import check_contract, check_same_bits
from qflash.testing.emulated_attention import UNTOUCHED, check_kernel, run_case
from qflash.testing.paged import POOLS, on_pages, plan_of

KERNEL, PAGED = "decode", "decode_pages"
ARCHES = (75, 80, 86, 90)
# One, two and four warps of rows; a window, of which the first tile is seen in part.
ROWS = Case("rows", 1, 150, 8, 1, 64, dtype="float16", window=(120, 0), batch=2, kv_lens=(150, 70))


@pytest.mark.slow  # sixteen libraries
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("q_heads", [8, 24, 60])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_tile_shapes(library, head_dim, q_heads, arch):
    check_kernel(library, replace(ROWS, head_dim=head_dim, q_heads=q_heads, seed=q_heads), KERNEL, arch)


# With libraries that the tests below have too.
@pytest.mark.parametrize(("name", "arch"), [("dim_128", 75), ("dim_128", 86), ("dim_256", 86), ("nan_v", 75)])
def test_cases_on_other_architectures(library, name, arch):
    check_kernel(library, BY_NAME[name], KERNEL, arch)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("q_heads", "head_dim", "arch"), [(4, 128, 75), (40, 128, 80), (4, 128, 86), (24, 256, 86)])
def test_whoever_is_slow(library, q_heads, head_dim, arch, seed):
    """Rings go round many times, with one, two and three stages."""
    case = Case("slow", 1, 1500, q_heads, 1, head_dim, dtype="float16", seed=1)
    check_contract(case, *run_case(library, case, KERNEL, arch, seed, multiprocessors=2))


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("rope", [Rotary(64), Rotary(64, interleaved=True), Rotary(24)])
def test_rope(library, rope, arch):
    """Queries are rotated as they are copied, and so are keys of arrays; keys in pages have been."""
    case = Case("rope", 3, 200, 4, 2, 64, dtype="float16", causal=True, batch=2, kv_lens=(200, 67), rope=rope)
    for kernel in (KERNEL, PAGED):
        check_kernel(library, case, kernel, arch)


def run_on_pages(library, case: Case, inputs, arch: int = 90, kernel: str = PAGED) -> list[np.ndarray]:
    plan, arrays = plan_of(case, inputs, kernel, "cpu")
    results = [np.full(result.shape, UNTOUCHED, result.dtype) for result in plan.results]
    compiled = library(kernel, case.dtype, case.head_dim, arch)
    operands = (arrays[operand.argument] for operand in plan.operands)
    compiled.launch(compiled.prepare(plan, VARIANTS[kernel]), (*operands, *results))
    return results


PAGES = Case("pages", 2, 300, 4, 2, 64, dtype="float16", causal=True, batch=4, kv_lens=(300, 1, 0, 133), seed=3)


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("page_size", [16, 32, 48, 256])
def test_pages(library, page_size, pool, arch):
    """Pages that are a part of a tile, a whole one and several; the bits do not depend on it."""
    inputs = PAGES.make_inputs()
    found = run_on_pages(library, PAGES, on_pages(PAGES, inputs, None, page_size, pool), arch)
    check_contract(PAGES, *found)
    check_same_bits(PAGES, found, run_case(library, PAGES, KERNEL, arch), "")


def test_pages_at_odd_addresses(library):
    """Rows that do not begin at multiples of 16 bytes pass through registers."""
    inputs = on_pages(PAGES, PAGES.make_inputs(), None, 16, "phtd")
    aligned = run_on_pages(library, PAGES, inputs)
    pools = {}
    for name in ("k_pages", "v_pages"):
        pool = getattr(inputs.kv, name)
        pools[name] = np.full((*pool.shape[:-1], pool.shape[-1] + 3), np.nan, pool.dtype)[..., 1:-2]
        pools[name][...] = pool
    odd = replace(inputs, kv=replace(inputs.kv, **pools))
    check_same_bits(PAGES, aligned, run_on_pages(library, PAGES, odd), "")
    with pytest.raises(NoKernelError, match=r"begins at no whole 16 bytes \(kernel='decode' takes those\)"):
        run_on_pages(library, PAGES, odd, kernel=f"sm90_{PAGED}")


@pytest.mark.parametrize("bad", [-1, 10**6])
@pytest.mark.parametrize("page_size", [16, 48])
def test_a_page_outside_the_pool_is_nan(library, page_size, bad):
    """In the rows of its sequence; the others keep their bits."""
    inputs = on_pages(PAGES, PAGES.make_inputs(), None, page_size, "phtd")
    good = run_on_pages(library, PAGES, inputs)
    table = inputs.kv.page_table.copy()
    table[3, 100 // page_size] = bad
    found = run_on_pages(library, PAGES, replace(inputs, kv=replace(inputs.kv, page_table=table)))
    for got, want in zip(found, good, strict=True):
        assert np.isnan(got[3].astype(np.float32)).all()
        np.testing.assert_array_equal(got[:3], want[:3])
