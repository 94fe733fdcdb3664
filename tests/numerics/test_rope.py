"""qflash.rope on the CPU: the definition in float64, and bit for bit what attention rotates q and k to."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import _native, reference
from qflash.ops.rope import ROPE
from qflash.ops.run import run
from qflash.testing.rotations import STORED_UNIT, check_rotated

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PAIRS = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


def drawn(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def rope_of(rows, rotary_dim, interleaved=False, **positions):
    return qflash.Rope(*qflash.rope_tables(rows, rotary_dim), interleaved, **positions)


SHAPES = [
    ((2, 5, 3, 64), 64), ((1, 9, 4, 128), 32), ((7, 2, 40), 40), ((2, 3, 2, 7), 6), ((1, 1, 1, 2), 2),
    ((3, 4, 2, 300), 262), ((1, 3, 1, 5000), 4098), ((3, 700, 8, 64), 48),
]  # fmt: skip


@PAIRS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "rotary_dim"), SHAPES, ids=str)
def test_against_float64(shape, rotary_dim, dtype, interleaved):
    """Whole and partial rotary_dim, odd head_dims, packed arrays, rows longer than a vector, more than one task."""
    x, rope = drawn(*shape, dtype=dtype), rope_of(shape[-3], rotary_dim, interleaved)
    check_rotated(qflash.rope(x, rope), x, rope)


@PAIRS
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_back(dtype, interleaved):
    """Also from position 0, whose sine need not be 0: tables may begin anywhere."""
    x = drawn(2, 6, 3, 40, dtype=dtype)
    cos, sin = (table[3:] for table in qflash.rope_tables(9, 24))
    rope = qflash.Rope(cos, sin, interleaved)
    for positions in (None, np.array([0, -1, 5, -5, 2, 2], np.int32)):
        (back,) = run(ROPE, (x, cos, sin, positions, None), (interleaved, True, None))
        check_rotated(back, x, rope, positions, inverse=True)


@PAIRS
def test_rotated_there_and_back(interleaved):
    x, rope = drawn(2, 50, 3, 64), rope_of(50, 64, interleaved)
    (back,) = run(ROPE, (qflash.rope(x, rope), rope.cos, rope.sin, None, None), (interleaved, True, None))
    np.testing.assert_allclose(back, x, rtol=0, atol=2e-6)


EACH = np.array([[0, -1, 8, -8, 3, 3], [7, 6, -5, 4, 0, 1]], np.int32)


@PAIRS
@pytest.mark.parametrize(
    "positions",
    [EACH, EACH[1], EACH.tolist(), EACH.astype(np.int64), EACH.T.copy().T, EACH[:, ::-1]],
    ids=["each", "all", "list", "int64", "strided", "reversed"],
)
def test_positions(positions, interleaved):
    x, rope = drawn(2, 6, 3, 16), rope_of(9, 12, interleaved)
    got = qflash.rope(x, rope, positions=positions)
    check_rotated(got, x, rope, np.asarray(positions))
    of_rope = rope_of(9, 12, interleaved, positions_k=positions)
    np.testing.assert_array_equal(qflash.rope(x, of_rope), got)


def test_positions_go_before_those_of_the_rope():
    x = drawn(2, 6, 3, 16)
    rope = rope_of(9, 12, positions_q=EACH, positions_k=np.zeros(6, np.int32))
    for positions in (EACH, rope.positions_q):
        np.testing.assert_array_equal(
            qflash.rope(x, rope, positions=positions), qflash.rope(x, rope_of(9, 12), positions=EACH)
        )


@pytest.mark.parametrize("positions_k", [None, EACH], ids=["q", "both"])
def test_positions_of_queries_alone_do_not_say_what_x_is(positions_k):
    rope = rope_of(9, 12, positions_q=EACH, positions_k=positions_k)
    with pytest.raises(ValueError, match=r"rope.positions_q is given and positions is None; allowed: positions="):
        qflash.rope(drawn(2, 6, 3, 16), rope)


def test_packed_tokens_are_a_batch_of_one():
    x, rope = drawn(6, 3, 16), rope_of(9, 12)
    np.testing.assert_array_equal(qflash.rope(x, rope), qflash.rope(x[None], rope)[0])
    restarted = [0, 1, 2, 0, 1, 2]  # of two sequences
    check_rotated(qflash.rope(x, rope, positions=restarted), x, rope, np.array(restarted))
    with pytest.raises(ValueError, match=r"positions has shape \[1, 6\]; allowed: \[6\]"):
        qflash.rope(x, rope, positions=[restarted])


@pytest.mark.parametrize("table_dtype", DTYPES)
def test_tables_of_any_dtype(table_dtype):
    cos, sin = (table.astype(DTYPES[table_dtype]) for table in qflash.rope_tables(5, 16))
    x = drawn(1, 5, 2, 16)
    check_rotated(qflash.rope(x, qflash.Rope(cos, sin)), x, qflash.Rope(cos, sin))


STRIDED = {
    "heads first": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "a slice of channels": lambda x: np.concatenate([x, x], -1)[..., : x.shape[-1]],
    "a part of q, k and v": lambda x: np.stack([x, x, x], 2)[:, :, 1],
    "channels with gaps": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "backwards": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "one sequence for all": lambda x: np.broadcast_to(x[:1], x.shape),
    "beside 16 bytes": lambda x: np.concatenate([x.ravel()[:1], x.ravel()])[1:].reshape(x.shape),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", STRIDED)
def test_strides(strided, dtype):
    rope = rope_of(6, 12)
    x = STRIDED[strided](drawn(2, 6, 3, 20, dtype=dtype))
    before = x.copy()
    got = qflash.rope(x, rope)
    check_rotated(got, x, rope)
    assert got.flags.c_contiguous and not np.shares_memory(got, x)
    np.testing.assert_array_equal(x, before)


def test_empty_arrays():
    rope = rope_of(4, 8)
    for shape in ((0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8), (0, 3, 8)):
        assert qflash.rope(np.zeros(shape, np.float32), rope).shape == shape
    none = qflash.Rope(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32))
    assert qflash.rope(np.zeros((2, 0, 2, 8), np.float32), none).shape == (2, 0, 2, 8)
    nowhere = np.zeros((2, 0), np.int32)
    assert qflash.rope(np.zeros((2, 0, 2, 8), np.float32), none, positions=nowhere).shape == (2, 0, 2, 8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_not_rotated_keeps_its_bits(dtype):
    """NaN with its payload, infinities and denormals; and none of them reaches what is rotated."""
    x = drawn(1, 2, 3, 40, dtype=dtype)
    bits = x.view(np.uint16)
    bits[..., 16:] = np.array([0x7FF1, 0xFC00, 0x7C00, 0x0001, 0x8000, 0xFFFF] * 4, np.uint16)
    got = qflash.rope(x, rope_of(2, 16))
    np.testing.assert_array_equal(got.view(np.uint16)[..., 16:], bits[..., 16:])
    assert np.isfinite(got[..., :16].astype(np.float32)).all()


@PAIRS
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities_are_where_the_definition_has_them(dtype, interleaved):
    x = drawn(1, 4, 1, 16, dtype=dtype)
    x[0, 1, 0, [0, 9]] = np.nan, np.inf
    x[0, 2, 0, [3, 4]] = -np.inf, np.inf
    rope = rope_of(4, 16, interleaved)
    with np.errstate(invalid="ignore"):
        got, exact = qflash.rope(x, rope).astype(np.float64), reference.rope(x, rope)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    np.testing.assert_array_equal(got[np.isinf(exact)], exact[np.isinf(exact)])


@pytest.mark.parametrize("bad", [9, -9, 2**31 - 1, -(2**31)])
def test_a_position_outside_the_tables_is_refused_by_name(bad):
    positions = EACH.copy()
    positions[1, 4] = bad
    x = drawn(2, 6, 3, 16)
    with pytest.raises(ValueError, match=rf"^positions\[4\] is {bad}; allowed: -8 to 8, the rows of rope.cos"):
        qflash.rope(x, rope_of(9, 12), positions=positions)
    with pytest.raises(ValueError, match=rf"^rope.positions_k\[4\] is {bad}; allowed: -8 to 8, the rows of rope.cos"):
        qflash.rope(x, rope_of(9, 12, positions_k=positions))


BAD = {
    "too few rows": (lambda x: qflash.rope(x, rope_of(5, 12)), "rope.cos has 5 rows; allowed: at least 6"),
    "no rows": (
        lambda x: qflash.rope(x, rope_of(0, 12), positions=[0] * 6),
        "rope.cos has 0 rows; allowed: at least 1",
    ),
    "wide tables": (
        lambda x: qflash.rope(x, rope_of(6, 18)),
        "rope.cos has 9 columns; allowed: at most half of x's, 8",
    ),
    "tables without columns": (
        lambda x: qflash.rope(x, qflash.Rope(*np.zeros((2, 6, 0), np.float32))),
        r"rope.cos has shape \[6, 0\]; allowed: \[positions, rotary_dim / 2\], with rotary_dim 2 or more",
    ),
    "full tables": (lambda x: qflash.rope(x, rope_of(6, 32)), "rope.cos has 16 columns; .*qflash.Rope.from_hf takes"),
    "unlike tables": (
        lambda x: qflash.rope(x, qflash.Rope(rope_of(6, 12).cos, rope_of(6, 8).sin)),
        r"rope.sin has shape \[6, 4\]; allowed: \[6, 6\]",
    ),
    "positions of others": (
        lambda x: qflash.rope(x, rope_of(6, 12), positions=np.zeros((3, 6), np.int32)),
        r"positions has shape \[3, 6\]; allowed: \[6\] or \[2, 6\]",
    ),
    "a matrix": (lambda x: qflash.rope(x[0, :, 0], rope_of(6, 12)), r"x has shape \[6, 16\]; allowed: \[batch, len"),
    "no channels": (lambda x: qflash.rope(x[..., :0], rope_of(6, 12)), "x has head_dim 0; allowed: 1 or more"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        call(drawn(2, 6, 3, 16))


# The rotation inside attention ---------------------------------------------------------------------------------------

SIZES = [(64, 64), (128, 32), (40, 24), (13, 6), (200, 46), (256, 256)]


@PAIRS
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
def test_attention_rotates_to_the_same_bits(head_dim, rotary_dim, interleaved):
    """In float32, where what is rotated goes into the products as it is."""
    q, k, v = drawn(3, 2, 20, 4, head_dim)
    at = np.arange(-4, 16, dtype=np.int32)
    rope = rope_of(24, rotary_dim, interleaved, positions_q=at, positions_k=at[::-1].copy())
    apart = [qflash.rope(x, rope, positions=where) for x, where in ((q, at), (k, rope.positions_k))]
    np.testing.assert_array_equal(qflash.attention(*apart, v), qflash.attention(q, k, v, rope=rope))


@PAIRS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pages_rotate_to_the_same_numbers(dtype, interleaved):
    """kv_write rounds each product, as quantization does everywhere: a last bit may differ, and no more."""
    k, rope = drawn(1, 16, 2, 64, dtype=dtype), rope_of(16, 48, interleaved)
    pages = np.zeros((1, 2, 16, 64), k.dtype)
    table = np.zeros((1, 1), np.int32)
    qflash.paged_write(qflash.PagedKV(pages, pages.copy(), table, np.array([16], np.int32)), k, k, rope=rope)
    stored, got = pages[0].swapaxes(0, 1).astype(np.float64), qflash.rope(k, rope)[0].astype(np.float64)
    assert (np.abs(got - stored) <= 2 * STORED_UNIT[dtype] * np.abs(got) + 1e-6).all()


@pytest.mark.process
def test_every_instruction_set():
    """Each below that which every other test here runs. The engine is told of one as it is loaded, hence processes."""
    sets = ("generic", "avx2", "avx512")
    best = _native.cpu_isa().replace("amx", "avx512")
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # which is slow to import
    command = [sys.executable, "-m", "pytest", "-q", *without, __file__, "-k", "to_the_same_bits"]
    for name in sets[: sets.index(best)]:
        subprocess.run(command, check=True, env={**os.environ, "QFLASH_CPU_ISA": name})
