"""Bad input to paged_write: the error names the argument, what came and what is allowed; and what its plan says."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import _native
from qflash.call.array import Array
from qflash.call.op import Operand
from qflash.ops import OPS
from qflash.ops.kv_write import KV_WRITE, WRITTEN

K = np.zeros((2, 3, 2, 64), np.float16)
PACKED = np.zeros((6, 2, 64), np.float16)
CU = np.array([0, 2, 6], np.int32)
POOL = np.zeros((5, 2, 16, 64), np.float16)
TABLE = np.zeros((2, 4), np.int32)
LENS = np.array([20, 3], np.int32)
SCALE = np.zeros((5, 2, 16), np.float32)
KV = qflash.PagedKV(POOL, POOL.copy(), TABLE, LENS)
KV8 = qflash.PagedKV(
    np.zeros((5, 2, 16, 64), np.int8), np.zeros((5, 2, 16, 64), np.int8), TABLE, LENS, SCALE, SCALE.copy(),
    np.zeros((2, 64), np.float32),
)  # fmt: skip
ROPE = qflash.Rope(*qflash.rope_tables(40, 64))


def write(kv=KV, k=K, v=K, **words):
    return qflash.paged_write(kv, k, v, **words)


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


BAD = {
    "kv": (lambda: write(kv=POOL), TypeError, "kv is numpy.ndarray; allowed: qflash.PagedKV"),
    "k list": (lambda: write(k=[1.0]), TypeError, "k is builtins.list; allowed: numpy.ndarray, torch.Tensor"),
    "k dtype": (lambda: write(k=K.astype("f8")), TypeError, "k has dtype float64; allowed: float32, float16"),
    "k rank": (lambda: write(k=K[0]), ValueError, r"k has shape \[3, 2, 64\]; allowed without cu_seqlens: rank 4"),
    "packed rank": (lambda: write(cu_seqlens=CU), ValueError, "k has shape .*; allowed with cu_seqlens: rank 3"),
    "v None": (lambda: write(v=None), TypeError, "v is None; allowed: an array like k"),
    "v dtype": (lambda: write(v=K.astype("f4")), TypeError, "v has dtype float32; allowed: float16"),
    "v shape": (lambda: write(v=K[:, :2]), ValueError, r"v has shape \[2, 2, 2, 64\]; allowed: \[2, 3, 2, 64\]"),
    "pages dtype": (
        lambda: write(k=K.astype("f4"), v=K.astype("f4")),
        TypeError,
        "kv.k_pages has dtype float16; allowed: k's, float32, or int8",
    ),
    "pages None": (lambda: write(replace(KV, k_pages=None)), TypeError, "kv.k_pages is None; allowed: an array"),
    "pages heads": (
        lambda: write(k=K[:, :, :1], v=K[:, :, :1]),
        ValueError,
        r"kv.k_pages has 2 heads; allowed: k's, 1 \(kv.layout",
    ),
    "page_size": (
        lambda: write(replace(KV, layout="pthd")),
        ValueError,
        r"kv.k_pages has shape \[5, 2, 16, 64\]; allowed: .* a page_size that is a multiple of 16",
    ),
    "pages head_dim": (
        lambda: write(k=K[..., :32], v=K[..., :32]),
        ValueError,
        "kv.k_pages has head_dim 64; allowed: k's, 32",
    ),
    "pages strides": (
        lambda: write(replace(KV, v_pages=np.zeros((5, 2, 16, 128), "f2")[..., ::2])),
        ValueError,
        "kv.v_pages has strides .*; allowed: 1 in the last dimension",
    ),
    "pages shared": (
        lambda: write(replace(KV, k_pages=_broadcast(POOL[:1], POOL.shape))),
        ValueError,
        r"kv.k_pages has strides \[0, 1024, 64, 1\]; allowed: none of 0, because it is written",
    ),
    "k_pages read-only": (
        lambda: write(replace(KV, k_pages=read_only(POOL))),
        ValueError,
        "kv.k_pages is read-only; allowed: a numpy.ndarray that qflash.paged_write can write to",
    ),
    "v_scale read-only": (lambda: write(replace(KV8, v_scale=read_only(SCALE))), ValueError, "kv.v_scale is read-only"),
    "batch": (
        lambda: write(k=K[:1], v=K[:1]),
        ValueError,
        "kv.page_table has 2 rows; allowed: k's batch size, 1",
    ),
    "table dtype": (
        lambda: write(replace(KV, page_table=TABLE.astype("i8"))),
        TypeError,
        "kv.page_table has dtype int64; allowed: int32",
    ),
    "lens shape": (
        lambda: write(replace(KV, lens=LENS[:1])),
        ValueError,
        r"kv.lens has shape \[1\]; allowed: \[2\]",
    ),
    "lens floats": (
        lambda: write(replace(KV, lens=LENS.astype("f4"))),
        TypeError,
        "kv.lens has dtype float32; allowed: an integer dtype",
    ),
    "cu_seqlens shape": (
        lambda: write(k=PACKED, v=PACKED, cu_seqlens=CU[:2]),
        ValueError,
        r"cu_seqlens has shape \[2\]; allowed: \[3\]",
    ),
    "cu_seqlens str": (
        lambda: write(k=PACKED, v=PACKED, cu_seqlens="abc"),
        TypeError,
        "cu_seqlens is builtins.str; allowed",
    ),
    "rope": (lambda: write(rope=POOL), TypeError, "rope is ndarray; allowed: None or qflash.Rope"),
    "rope wide": (
        lambda: write(rope=qflash.Rope(*qflash.rope_tables(40, 128))),
        ValueError,
        "rope.cos has 64 columns; allowed: at most half of k's, 32",
    ),
    "rope no rows": (
        lambda: write(rope=qflash.Rope(ROPE.cos[:0], ROPE.sin[:0])),
        ValueError,
        "rope.cos has 0 rows; allowed: at least 1",
    ),
    "positions": (
        lambda: write(rope=replace(ROPE, positions_k=np.zeros((2, 4), "i4"))),
        ValueError,
        r"rope.positions_k has shape \[2, 4\]; allowed: \[3\] or \[2, 3\]",
    ),
    "scale missing": (
        lambda: write(replace(KV8, k_scale=None)),
        TypeError,
        "kv.k_scale is None and kv.k_pages int8; allowed: an array",
    ),
    "scale given": (
        lambda: write(replace(KV, k_scale=SCALE)),
        TypeError,
        "kv.k_scale is given and kv.k_pages not int8; allowed: None",
    ),
    "scale dtype": (
        lambda: write(replace(KV8, v_scale=SCALE.astype("f2"))),
        TypeError,
        "kv.v_scale has dtype float16; allowed: float32",
    ),
    "mean shape": (
        lambda: write(replace(KV8, k_mean=np.zeros(64, "f4"))),
        ValueError,
        r"kv.k_mean has shape \[64\]; allowed: \[2, 64\]",
    ),
    "layout": (lambda: write(replace(KV, layout="hptd")), ValueError, "kv.layout is 'hptd'; allowed: 'phtd', 'pthd'"),
    "kernel": (lambda: write(kernel="fa"), ValueError, "kernel is 'fa'; allowed: None, "),
}


def _broadcast(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One page for all, which NumPy would not let anybody write to by itself."""
    return np.lib.stride_tricks.as_strided(x, shape, (0, *x.strides[1:]), writeable=True)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("case", ["plain", "int8", "packed"])
def test_a_plan_writes_to_the_pages_and_converts_none_of_them(case):
    kv, k = (KV8 if case == "int8" else KV), (PACKED if case == "packed" else K)
    arrays = (k, k, kv.k_pages, kv.v_pages, TABLE, LENS, kv.k_scale, kv.v_scale, kv.k_mean)
    arrays += (CU if case == "packed" else None, ROPE.cos, ROPE.sin, None)
    described = (None if x is None else Array(x.shape, None, x.dtype.name, "cuda:0") for x in arrays)
    plan = KV_WRITE.plan(*described, "phtd", False, None)
    assert [one.argument for one in plan.written] == [name for name in WRITTEN if case == "int8" or "scale" not in name]
    assert not any(one.contiguous or one.dtype for one in plan.written)
    assert plan.results == () and not plan.nothing_to_do
    size, _ = _native.op_layouts["QfKvWriteParams"]
    assert len(plan.params()) == size
    fields = dict(plan.fields)
    assert (fields["k_len"], fields.get("total_k", 0)) == ((6, 6) if case == "packed" else (3, 0))
    assert fields["columns"] == 4 and fields["kv.page_size"] == 16 and fields["kv.pages"] == 5
    assert fields["kv.k.stride_t"] == 64 and fields["kv.k.stride_h"] == 16 * 64


def test_an_operand_that_is_written_cannot_be_converted():
    for words in ({"contiguous": True}, {"dtype": "float32"}):
        with pytest.raises(
            ValueError, match=r"kv.k_pages is written and would be converted; allowed: an array as it is"
        ):
            Operand("kv.k_pages", "kv.k.data", written=True, **words)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_operation_that_writes_names_its_arrays(op):
    assert set(op.writes) <= set(op.arrays)
    assert list(op.writes) == sorted(op.writes, key=op.arrays.index)
    assert not (op.writes and (op.gradient or op.results or op.autocast)) and not set(op.writes) & set(op.indices)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_no_tokens_leave_the_pages_as_they_are(dtype):
    pool = np.ones((5, 2, 16, 64), dtype)
    kv = qflash.PagedKV(pool, pool, TABLE, LENS)
    none = np.zeros((2, 0, 2, 64), dtype)
    assert qflash.paged_write(kv, none, none, rope=ROPE) is kv and (pool == 1).all()
