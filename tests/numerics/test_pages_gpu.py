"""Every CUDA kernel that takes pages, on a GPU: page sizes, groups, head dims, tables that change under a graph,
repeats, entries that point nowhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.testing import Case, cases, check
from qflash.testing.paged import PAGE_SIZES
from qflash.testing.runner import arch_of, refusals, suited

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_torch")]
KERNELS = [row.name for row in dispatch.variants_of("attention", "cuda", "pages")]
ROWS = [row.name for row in dispatch.variants_of("attention", "cuda", "pages") if row.kernel.few_rows]
INT8 = [row.name for row in dispatch.variants_of("attention", "cuda", "pages_int8") if row.kernel.few_rows]


def check_served(case: Case, kernel: str, framework: str = "native-cuda") -> None:
    case = suited(case, kernel, arch_of("cuda"))
    if not refusals(case, kernel, arch_of("cuda")):
        check(case, kernel, framework)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_page_sizes_groups_and_head_dims(kernel, group, head_dim):
    """The seed of a case chooses its page size (qflash/testing/paged.py), the size of the group its queries."""
    for turn, _ in enumerate(PAGE_SIZES):
        q_len = 1 + (turn + group) % 8
        lens = (300, 0, 257, 1)
        case = Case(
            "pages", q_len, 300, 2 * group, 2, head_dim, 4, "bfloat16", True, kv_lens=lens, seed=turn + 5 * group
        )
        check_served(case, kernel)


@pytest.mark.slow  # the whole product: page sizes, groups, lengths, head dims
@pytest.mark.parametrize("kernel", KERNELS + INT8)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_every_page_size_and_length(kernel, group, head_dim):
    for q_len, turn in product(range(1, 9), range(len(PAGE_SIZES))):
        seed = turn + len(PAGE_SIZES) * (group + q_len)  # which chooses how pools lie in memory, too
        lens = (300, 0, 257, 1)
        case = Case("every", q_len, 300, 2 * group, 2, head_dim, 4, "bfloat16", True, kv_lens=lens, seed=seed)
        check_served(case, kernel, "torch-cuda" if kernel in INT8 else "native-cuda")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", cases("full"), ids=lambda case: case.name)
def test_contract(case, kernel):
    check_served(case, kernel)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ROWS])
@pytest.mark.parametrize("seed", range(15))
def test_prefill(kernel, seed):
    case = Case("prefill", 300 + 17 * seed, 700, 4, 2, (64, 128, 256)[seed % 3], 2, "bfloat16", True, seed=seed)
    check_served(replace(case, kv_lens=(700, 333 + seed)), kernel)


def paged(kernel, batch, keys, page, q_heads=8, kv_heads=2, head_dim=128, q_len=1, seed=0):
    """(q, k, v, kv): arrays and the same in shuffled pages."""
    torch.manual_seed(seed)
    q = torch.randn(batch, q_len, q_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, keys, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    columns = keys // page
    order = torch.randperm(2 * batch * columns, device="cuda")[: batch * columns]
    pools = []
    for x in (k, v):
        pool = torch.full((2 * batch * columns, kv_heads, page, head_dim), torch.nan, device="cuda", dtype=x.dtype)
        pool[order] = x.view(batch * columns, page, kv_heads, head_dim).transpose(1, 2)
        pools.append(pool)
    lens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    return q, k, v, qflash.PagedKV(*pools, order.view(batch, columns).to(torch.int32), lens)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("page", [16, 256])
def test_graphs_serve_tables_and_lengths_that_change(name, page):
    kernel = dispatch.VARIANTS[name].kernel.name
    q, _, _, kv = paged(kernel, 6, 1024, page, q_len=2)
    qflash.attention(q, kv, causal=True, kernel=kernel)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qflash.attention(q, kv, causal=True, kernel=kernel)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        kv.lens.copy_(torch.randint(0, 1025, (6,), generator=generator, dtype=torch.int32))
        kv.page_table.copy_(kv.page_table[torch.randperm(6, generator=generator)])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, qflash.attention(q, kv, causal=True, kernel=kernel))
        assert not out.isnan().any()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("entry", [-1, 2**31 - 1, -(2**31)])
def test_an_entry_that_points_nowhere_makes_its_sequence_nan(name, entry):
    kernel = dispatch.VARIANTS[name].kernel.name
    q, _, _, kv = paged(kernel, 3, 1024, 64)
    want = qflash.attention(q, kv, kernel=kernel)
    kv.page_table[1, 9] = entry
    out = qflash.attention(q, kv, kernel=kernel)
    assert out[1].isnan().all() and torch.equal(out[[0, 2]], want[[0, 2]])
    kv.lens[1] = 9 * 64  # now nobody needs it
    assert not qflash.attention(q, kv, kernel=kernel).isnan().any()


@pytest.mark.parametrize("name", KERNELS)
def test_many_repeats_have_the_same_bits(name):
    kernel = dispatch.VARIANTS[name].kernel.name
    q, k, v, kv = paged(kernel, 5, 2048, 64, 32, 8)
    first = qflash.attention(q, kv, kernel=kernel)
    for _ in range(1000):
        assert torch.equal(first, qflash.attention(q, kv, kernel=kernel))
    lens = torch.tensor([2048] * 5, dtype=torch.int32, device="cuda")
    arrays = qflash.attention(q, k, v, kv_lens=lens, kernel=kernel)
    assert np.isclose((first - arrays).float().norm().item(), 0.0, atol=1e-2)
