"""NumPy front end: dtypes, strides, packed sequences, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash.call import cache
from qflash.testing.compare import FLOAT32_L2, HALF_FACTOR, UNIT_ROUNDOFF
from qflash.testing.concurrency import check_threads_share_plans

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def arrays(batch=2, q_len=9, k_len=13, q_heads=4, kv_heads=2, dim=16, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((batch, q_len, q_heads, dim), (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, dim))
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def plain(q, k, v, causal=False):
    """Attention by its definition in float64: out and lse."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    if causal:
        i, j = np.ogrid[: s.shape[2], : s.shape[3]]
        s = np.where(j <= i + s.shape[3] - s.shape[2], s, -np.inf)
    lse = np.log(np.exp(s).sum(-1))
    return np.einsum("bhij,bjhd->bihd", np.exp(s - lse[..., None]), v), lse


def relative(got, want):
    return np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_values_and_types(name, causal):
    q, k, v = arrays(dtype=DTYPES[name])
    out, lse = qflash.attention(q, k, v, causal=causal, return_lse=True)
    want, want_lse = plain(q, k, v, causal)
    assert (out.dtype, out.shape, lse.dtype, lse.shape) == (q.dtype, q.shape, np.float32, (2, 4, 9))
    assert type(out) is np.ndarray and out.flags.c_contiguous and out.flags.writeable
    assert relative(out, want) < (FLOAT32_L2 if name == "float32" else HALF_FACTOR * UNIT_ROUNDOFF[name])
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


def test_strides_are_taken_as_they_are():
    q, k, v = arrays()
    want = qflash.attention(q, k, v)
    views = {
        "heads first": [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)],
        "reversed": [np.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in (q, k, v)],
        "sliced": [np.concatenate((x, x), -1)[..., :16] for x in (q, k, v)],
    }
    for name, view in views.items():
        np.testing.assert_array_equal(qflash.attention(*view), want, err_msg=name)
    one = qflash.attention(q[:1], k[:1], v[:1])
    spread = [np.broadcast_to(x[:1], (3, *x.shape[1:])) for x in (q, k, v)]
    np.testing.assert_array_equal(qflash.attention(*spread), np.repeat(one, 3, 0))


def test_inputs_may_be_read_only_and_stay_as_they_are():
    args = arrays()
    copies = [x.copy() for x in args]
    for x in args:
        x.setflags(write=False)
    qflash.attention(*args, causal=True)
    for x, y in zip(args, copies, strict=True):
        np.testing.assert_array_equal(x, y)


def test_packed_matches_one_sequence_at_a_time():
    pieces = [arrays(batch=1, q_len=n, k_len=m, seed=n) for n, m in ((5, 5), (0, 3), (7, 11), (2, 1))]
    q, k, v = (np.concatenate([p[i][0] for p in pieces]) for i in range(3))
    cu_q, cu_k = (np.cumsum([0, *(p[i].shape[1] for p in pieces)]).astype(np.int32) for i in (0, 1))
    cos, sin = qflash.rope_tables(16, 8)
    options = {"causal": True, "rope": qflash.Rope(cos, sin), "return_lse": True}
    out, lse = qflash.attention_varlen(q, k, v, cu_q, cu_k, 7, 11, **options)
    assert lse.shape == (4, 14)
    for b, piece in enumerate(pieces):
        want, want_lse = qflash.attention(*piece, **options)
        np.testing.assert_allclose(out[cu_q[b] : cu_q[b + 1]], want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[:, cu_q[b] : cu_q[b + 1]], want_lse[0], rtol=1e-5, atol=1e-6)


def test_index_arrays_and_tables_need_not_be_contiguous():
    q, k, v = arrays()
    lens = np.array([[13, 0], [4, 0]], np.int32)[:, 0]
    cos, sin = qflash.rope_tables(32, 16)
    tables = np.stack((cos, sin), -1)
    want = qflash.attention(q, k, v, kv_lens=lens.copy(), rope=qflash.Rope(cos, sin))
    got = qflash.attention(q, k, v, kv_lens=lens, rope=qflash.Rope(tables[..., 0], tables[..., 1]))
    np.testing.assert_array_equal(got, want)
    halves = qflash.Rope(cos.astype(ml_dtypes.bfloat16), sin.astype(ml_dtypes.bfloat16))
    rounded = qflash.Rope(halves.cos.astype(np.float32), halves.sin.astype(np.float32))
    np.testing.assert_array_equal(qflash.attention(q, k, v, rope=halves), qflash.attention(q, k, v, rope=rounded))


def test_empty():
    q, k, v = arrays(k_len=0)
    out, lse = qflash.attention(q, k, v, return_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all()
    assert qflash.attention(*arrays(batch=0)).shape == (0, 9, 4, 16)
    assert qflash.attention(*arrays(q_len=0)).shape == (2, 0, 4, 16)


def test_subclasses_that_are_plain_memory(tmp_path):
    q, k, v = arrays()
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=q.shape)
    mapped[:] = q
    np.testing.assert_array_equal(qflash.attention(mapped, k, v), qflash.attention(q, k, v))


def test_threads_share_plans():
    check_threads_share_plans(arrays, np.array_equal)


def test_plan_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 4)
    for n in range(1, 12):
        qflash.attention(*arrays(q_len=n))
        assert len(cache._plans) <= 4


Q, K, V = arrays()


def misaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    moved = raw.view(x.dtype).reshape(x.shape)
    moved[:] = x
    return moved


BAD = {
    "list": ({"k": K.tolist()}, TypeError, r"k is builtins\.list; allowed: numpy\.ndarray"),
    "masked": ({"v": np.ma.masked_array(V)}, TypeError, "v is a masked array"),
    "foreign bytes": ({"k": K.astype(">f4")}, TypeError, "k has dtype >f4, a foreign byte order"),
    "misaligned": (
        {"q": misaligned(Q)},
        ValueError,
        "q starts at an address that is no multiple .* 4 bytes; allowed: .*q.copy",
    ),
    "odd strides": (
        {"q": np.zeros(Q.shape, np.dtype([("x", "f4"), ("y", "i1")], align=False))["x"]},
        ValueError,
        "q has byte strides",
    ),
    "float64": ({"q": Q.astype(np.float64)}, TypeError, "q has dtype float64; allowed: float32, float16, bfloat16"),
    "integers": ({"q": Q.astype(np.int8)}, TypeError, "q has dtype int8"),
    "objects": ({"q": Q.astype(object)}, TypeError, "q has dtype object"),
    "last stride": ({"q": Q.repeat(2, -1)[..., ::2]}, ValueError, "q has stride 2 in its last dimension"),
    "scale": ({"scale": True}, TypeError, "scale is True"),
    "window": ({"window": (True, 0)}, TypeError, r"window is \(True, 0\)"),
    "lens": ({"kv_lens": {1, 2}}, TypeError, r"kv_lens is builtins\.set; allowed: a list or tuple of ints"),
    "lens dtype": ({"kv_lens": np.array([1.0, 2.0])}, TypeError, "kv_lens has dtype float64; allowed: an integer"),
    "lens value": ({"kv_lens": np.array([1, 14], np.int32)}, ValueError, r"kv_lens\[1\] is 14"),
    "rope": ({"rope": "yes"}, TypeError, r"rope is str; allowed: None or qflash\.Rope"),
}


@pytest.mark.parametrize(("changes", "error", "text"), BAD.values(), ids=BAD.keys())
def test_refused(changes, error, text):
    good = {"q": Q, "k": K, "v": V}
    qflash.attention(**good, scale=1.0)  # plans that an equal key of another meaning must not find
    qflash.attention(**good, window=(1, 0))
    with pytest.raises(error, match=text):
        qflash.attention(**{**good, **changes})
