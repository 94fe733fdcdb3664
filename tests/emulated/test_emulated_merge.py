"""merge run on the CPU: every pair of types, rows that do not begin at whole vectors, the edges of lse, and what it is
for: a prefix that sequences share."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import reference

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


def drawn(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def check(gpu, *arrays):
    out, lse = qflash.merge(*arrays)
    assert gpu.launched[-1] == "merge"
    wanted_out, wanted_lse = reference.merge(*arrays)
    tolerance = TOLERANCE[out.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), wanted_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (1, 1, 1, 1), (7, 4, 22)], ids=str)
def test_every_pair_of_types(gpu, a, b, shape):
    rows = (*shape[:-3], shape[-2], shape[-3])
    check(gpu, drawn(*shape, dtype=a), 3 * drawn(*rows), drawn(*shape, dtype=b, seed=1), 3 * drawn(*rows, seed=1))


def test_edges_of_lse(gpu):
    values = np.array([-np.inf, np.inf, np.nan, 0.0, -200.0, 200.0, 3e38, -3e38, 1e-30], np.float32)
    lse_a, lse_b = (x.reshape(1, 1, -1) for x in np.meshgrid(values, values))
    out_a, out_b = drawn(1, lse_a.size, 1, 8), drawn(1, lse_a.size, 1, 8, seed=1)
    out_a[:, lse_a[0, 0] == -np.inf] = np.nan
    check(gpu, out_a, lse_a, out_b, lse_b)


@pytest.mark.parametrize(("kernel", "sequences"), [("sm90_decode", 5), ("decode", 5), ("sm90_decode", 16)])
def test_a_prefix_that_sequences_share(gpu, kernel, sequences):
    """All queries as those of one sequence on the prefix, each sequence's on the rest, and a merge."""
    pages, page_size, heads, own = 9, 16, (4, 1), 3
    pools = drawn(2, pages + own * sequences, heads[1], page_size, 64, dtype="bfloat16")
    table = np.arange(pages, pages + own * sequences, dtype=np.int32).reshape(sequences, own)
    table = np.concatenate([np.tile(np.arange(pages, dtype=np.int32), (sequences, 1)), table], 1)
    lens = (pages * page_size + 1 + np.arange(sequences) * 2).astype(np.int32)
    q = drawn(sequences, 1, heads[0], 64, dtype="bfloat16", seed=1)
    kv = qflash.PagedKV(*pools, table, lens)
    words = {"causal": True, "return_lse": True, "kernel": kernel, "sinks": drawn(heads[0])}
    wanted = qflash.attention(q, kv, **words)
    gpu.launched.clear()
    found = qflash.attention(q, qflash.share_prefix(kv, pages), **words)
    assert gpu.launched == [kernel, kernel, "merge"]
    for one, other, tolerance in zip(found, wanted, (2 * TOLERANCE["bfloat16"], 1e-5), strict=True):
        np.testing.assert_allclose(*(x.astype(np.float64) for x in (one, other)), rtol=tolerance, atol=tolerance)
