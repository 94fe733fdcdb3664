"""attention on pages: what is wrong is refused by name, whatever part of the PagedKV it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.call.spec import Spec
from qflash.frontends.numpy import describe

GOOD = qflash.PagedKV(
    *(np.zeros((5, 2, 16, 32), np.float32) for _ in range(2)),
    page_table=np.array([[3, 0], [1, -1]], np.int32),
    lens=np.array([20, 5], np.int32),
)
Q = np.zeros((2, 3, 4, 32), np.float32)
SCALE = np.ones((5, 2, 16), np.float32)
BYTES = np.zeros((5, 2, 16, 32), np.int8)

WRONG = {
    "rank": ({"k_pages": GOOD.k_pages[0]}, ValueError, "kv.k_pages has shape"),
    "page size": ({"k_pages": GOOD.k_pages[:, :, :8], "v_pages": GOOD.v_pages[:, :, :8]}, ValueError, "multiple of 16"),
    "dtype of k": ({"k_pages": GOOD.k_pages.astype(np.float16)}, TypeError, "kv.k_pages has dtype float16"),
    "dtype of v": ({"v_pages": GOOD.v_pages.astype(np.float16)}, TypeError, "kv.v_pages has dtype float16"),
    "shape of v": ({"v_pages": GOOD.v_pages[:4]}, ValueError, "kv.v_pages has shape"),
    "strides": ({"k_pages": np.zeros((5, 2, 16, 64), np.float32)[..., ::2]}, ValueError, "kv.k_pages has strides"),
    "table dtype": ({"page_table": GOOD.page_table.astype(np.int64)}, TypeError, "kv.page_table has dtype int64"),
    "table rank": ({"page_table": GOOD.page_table[0]}, ValueError, "kv.page_table has shape"),
    "table rows": ({"page_table": GOOD.page_table[:1], "lens": GOOD.lens[:1]}, ValueError, "kv.page_table has 1 rows"),
    "lens": ({"lens": GOOD.lens[:1]}, ValueError, "kv.lens has shape"),
    "no table": ({"page_table": None}, TypeError, "kv.page_table is None"),
    "layout": ({"layout": "thd"}, ValueError, "kv.layout is 'thd'"),
    "scales of floats": ({"k_scale": SCALE}, TypeError, "kv.k_scale is given"),
    "bytes without scales": ({"k_pages": BYTES, "v_pages": BYTES}, TypeError, "kv.k_scale is None"),
    "shape of scales": (
        {"k_pages": BYTES, "v_pages": BYTES, "k_scale": SCALE[:4], "v_scale": SCALE}, ValueError, "kv.k_scale has",
    ),
    "mean of floats": ({"k_mean": np.zeros((2, 32), np.float32)}, TypeError, "kv.k_mean is given"),
    "an entry that is needed": ({"page_table": np.array([[3, 5], [1, -1]], np.int32)}, ValueError, "page_table"),
    "a length past the table": ({"lens": np.array([33, 5], np.int32)}, ValueError, "lens"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    changes, kind, said = WRONG[name]
    qflash.attention(Q, GOOD, causal=True)
    with pytest.raises(kind, match=said):
        qflash.attention(Q, replace(GOOD, **changes), causal=True)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ({"v": Q}, TypeError, "which has v in it"),
        ({"kv_lens": GOOD.lens}, TypeError, "kv_lens is given"),
        ({"precision": "int8"}, ValueError, "precision is 'int8'"),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks has shape"),
    ],
    ids=["v", "kv_lens", "precision", "sinks"],
)
def test_words(words, kind, said):
    with pytest.raises(kind, match=said):
        qflash.attention(Q, GOOD, **words)


def test_heads_and_head_dim():
    with pytest.raises(ValueError, match="head_dim 32; allowed: q's, 16"):
        qflash.attention(Q[..., :16], GOOD)
    with pytest.raises(ValueError, match="allowed: a divisor of q's 3 heads"):
        qflash.attention(Q[:, :, :3], GOOD)


def test_packed_queries_have_no_offsets_of_keys():
    starts = np.array([0, 1, 2], np.int32)
    with pytest.raises(TypeError, match="cu_seqlens_k is given"):
        qflash.attention_varlen(Q[0], GOOD, None, starts, starts, 1, None)


# Where rows lie -------------------------------------------------------------------------------------------------------


def spec_of(q_dtype, kv, arch: int = 90) -> Spec:
    """Of two queries on a GPU."""
    plans = []

    def planned(op, arrays, words):
        described = (
            None if x is None else replace(describe(name, x, op.arrays[0]), device="cuda")
            for name, x in zip(op.arrays, arrays, strict=True)
        )
        plans.append(op.plan(*described, *words))
        return [None, None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qflash.frontends.numpy.run", planned)
        qflash.attention(np.zeros((2, 1, 4, 32), q_dtype), kv)
    return plans[0].spec(arch)


@pytest.mark.parametrize(
    ("gap", "kernel"),
    [((0, 0, 0), "sm90_decode"), ((0, 0, 8), "sm90_decode"), ((0, 0, 4), "decode"), ((0, 1, 0), "sm90_decode")],
)
def test_pools_that_the_copy_engine_cannot_walk_are_read_by_another_kernel(gap, kernel):
    room = [size + more for size, more in zip((5, 2, 16, 32), (0, *gap), strict=True)]
    pools = [np.zeros(room, np.float16)[:, :2, :16, :32] for _ in "kv"]
    spec = spec_of(np.float16, replace(GOOD, k_pages=pools[0], v_pages=pools[1]))
    assert dispatch.choose(spec).name == kernel
    if kernel != "sm90_decode":
        why = dict((name, reason) for name, _, reason in dispatch.verdicts(spec))["sm90_decode"]
        assert why == "takes pools whose pages, heads and tokens are whole 16 bytes apart, as the copy engine does"


def test_no_step_is_taken_in_a_dimension_of_one():
    pools = [np.zeros((5, 17, 1, 32), np.float16)[:, :16].swapaxes(1, 2) for _ in "kv"]
    strided = [np.lib.stride_tricks.as_strided(x, strides=(x.strides[0], 6, *x.strides[2:])) for x in pools]
    assert not spec_of(np.float16, replace(GOOD, k_pages=strided[0], v_pages=strided[1])).odd_pages


@pytest.mark.parametrize(
    ("gap", "arch", "kernel"), [(0, 90, "sm90_decode"), (4, 80, "decode"), (1, 90, "sm90_fwd"), (1, 80, "fa_mma")]
)
def test_scales_that_cannot_be_copied_in_runs_are_read_by_another_kernel(gap, arch, kernel):
    scales = [np.zeros((5, 2, 16 + gap), np.float32)[..., :16] for _ in "kv"]
    kv = replace(GOOD, k_pages=BYTES, v_pages=BYTES, k_scale=scales[0], v_scale=scales[1])
    spec = spec_of(np.float16, kv, arch)
    assert dispatch.choose(spec).name == kernel
    if gap == 1:
        reasons = dict((name, reason) for name, _, reason in dispatch.verdicts(spec))
        assert reasons["decode"] == "takes scales of int8 pages whose pages and heads are whole 16 bytes apart"
