"""attention on pages: what is wrong is refused by name, whatever part of the PagedKV it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import qflash

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
