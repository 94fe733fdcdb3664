"""rope run on the CPU (qflash/csrc/emulate): every type, both ways to pair channels, both directions; arrays and tables
that begin or step where no 16 bytes do; positions of every kind; the bits of the rotation inside attention."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash.call.spec import DTYPES as NAMES
from qflash.testing.rotations import check_rotated

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
GUARD = 77.0
INT_MIN = -(2**31)


def drawn(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def placed(x: np.ndarray, start: int = 0, gap: int = 0) -> np.ndarray:
    """x in memory of its own, `start` elements past 64 aligned bytes, its heads `gap` elements apart; else guards."""
    pitch = x.shape[-1] + gap
    lead = int(np.prod(x.shape[:-1]))
    memory = np.full(start + lead * pitch + 128, GUARD, x.dtype)
    first = (-memory.ctypes.data) % 64 // x.itemsize + start
    view = memory[first : first + lead * pitch].reshape(*x.shape[:-1], pitch)[..., : x.shape[-1]]
    view[...] = x
    return view


def strides(name: str, x: np.ndarray) -> dict[str, int]:
    steps = [step // x.itemsize for step in x.strides[:-1]]
    return dict(zip((f"{name}.stride_{axis}" for axis in "bth"), steps, strict=True))


def rotated(library, x, rope, positions=None, *, inverse=False, out=None, order=1, **more):
    """What the emulated kernel writes for x `[B, T, H, D]` as it lies; out: zeros, where to, else without gaps."""
    out = placed(np.zeros_like(x)) if out is None else out
    memory = out.base
    before = memory.copy()
    batch, length, heads, head_dim = x.shape
    rows, half = rope.cos.shape
    fields = {
        "dtype": NAMES.index(x.dtype.name), "batch": batch, "length": length, "heads": heads, "head_dim": head_dim,
        "inverse": int(inverse), "x.data": x, **strides("x", x), "out.data": out, **strides("out", out),
        "rope.cos": rope.cos, "rope.sin": rope.sin, "rope.rows": rows, "rope.rotary_dim": 2 * half,
        "rope.interleaved": int(rope.interleaved), "positions": positions,
        "stride_positions_b": 0 if positions is None or positions.ndim == 1 else length, **more,
    }  # fmt: skip
    library("rope", x.dtype.name).launch_struct("QfRopeParams", fields, order)
    result = out.copy()
    out[...] = 0
    np.testing.assert_array_equal(memory, before)  # nothing else was written
    return result


# x's shape, rotary_dim: of whole granules, with a rest of none, one or more pieces; odd ones; one pair; more heads than
# a thread has.
SHAPES = [
    ((2, 5, 4, 64), 64), ((1, 3, 9, 128), 32), ((2, 4, 3, 24), 16), ((1, 7, 5, 40), 32), ((2, 3, 1, 80), 40),
    ((1, 5, 2, 7), 6), ((1, 4, 3, 2), 2), ((1, 2, 6, 33), 32), ((3, 1, 17, 16), 4),
]  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "rotary_dim"), SHAPES, ids=str)
def test_both_directions(library, shape, rotary_dim, dtype, interleaved):
    x = drawn(*shape, dtype=dtype)
    rope = qflash.Rope(*qflash.rope_tables(shape[1], rotary_dim), interleaved)
    for inverse in (False, True):
        first = rotated(library, placed(x), rope, inverse=inverse)
        check_rotated(first, x, rope, inverse=inverse)
        np.testing.assert_array_equal(first, rotated(library, placed(x), rope, inverse=inverse, order=2))


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_alignment_changes_a_bit(library, dtype, interleaved):
    """x, out and the tables begin at 16 bytes or beside them, heads lie at whole granules or do not."""
    x = drawn(2, 3, 5, 48, dtype=dtype)
    tables = qflash.rope_tables(3, 32)
    wanted = rotated(library, placed(x), qflash.Rope(*tables, interleaved))
    granule = 16 // x.itemsize
    for start, gap, out_start, out_gap, table_start in product((0, 1, granule), (0, 1), (0, 1), (0, granule), (0, 1)):
        cos, sin = (placed(table, table_start) for table in tables)
        got = rotated(
            library,
            placed(x, start, gap),
            qflash.Rope(cos, sin, interleaved),
            out=placed(np.zeros_like(x), out_start, out_gap),
        )
        np.testing.assert_array_equal(got, wanted)


def test_a_stride_that_no_step_takes_does_not_matter(library):
    x = placed(drawn(1, 1, 1, 16))
    rope = qflash.Rope(*qflash.rope_tables(1, 16))
    odd = {"x.stride_b": 3, "x.stride_t": 5, "x.stride_h": 7}
    np.testing.assert_array_equal(rotated(library, x, rope, **odd), rotated(library, x, rope))


def test_transposed_heads_and_expanded_batches(library):
    """Layout "bhtd", and one sequence for a whole batch."""
    x = drawn(2, 3, 5, 32)
    rope = qflash.Rope(*qflash.rope_tables(5, 32))
    transposed = placed(x).swapaxes(1, 2)
    check_rotated(rotated(library, transposed, rope), transposed, rope)
    expanded = np.broadcast_to(placed(x[:1].swapaxes(1, 2).copy()), (4, 5, 3, 32))
    check_rotated(rotated(library, expanded, rope), expanded, rope)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (10, 6)])
def test_positions(library, head_dim, rotary_dim, interleaved):
    """For all sequences or for each, in either place; negative ones; where both are given, `positions` counts."""
    x = placed(drawn(2, 6, 3, head_dim))
    rope = qflash.Rope(*qflash.rope_tables(9, rotary_dim), interleaved)
    each = np.array([[0, -1, 8, -8, 3, 3], [7, 6, -5, 4, 0, 1]], np.int32)
    for positions, inverse in product((each, each[1]), (False, True)):
        got = rotated(library, x, rope, positions, inverse=inverse)
        check_rotated(got, x, rope, positions, inverse)
        step = 0 if positions.ndim == 1 else 6
        other = {"rope.positions_k": positions, "rope.stride_positions_k_b": step}
        np.testing.assert_array_equal(rotated(library, x, rope, inverse=inverse, **other), got)
    other = {"rope.positions_k": np.zeros(6, np.int32), "rope.positions_q": np.zeros(6, np.int32)}
    np.testing.assert_array_equal(rotated(library, x, rope, each, **other), rotated(library, x, rope, each))


def test_the_way_back_from_position_0(library):
    """Tables may begin anywhere, so row 0 may have a sine."""
    x = placed(drawn(1, 1, 2, 16))
    cos, sin = (np.ascontiguousarray(table[5:]) for table in qflash.rope_tables(6, 16))
    rope = qflash.Rope(cos, sin)
    check_rotated(rotated(library, x, rope, inverse=True), x, rope, inverse=True)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 24), ("bfloat16", 48), ("float16", 21)])
def test_a_position_outside_the_tables_gives_nan(library, dtype, head_dim, interleaved):
    """In the channels that are rotated, of that token alone; nothing outside the tables is read."""
    rope = qflash.Rope(*qflash.rope_tables(3, 16), interleaved)
    positions = np.array([2, 3, -3, -2, 2**31 - 1, INT_MIN, 0], np.int32)
    x = placed(drawn(1, len(positions), 2, head_dim, dtype=dtype))
    got = rotated(library, x, rope, positions)
    outside = np.abs(positions.astype(np.int64)) >= 3
    assert np.isnan(got[:, outside, :, :16].astype(np.float32)).all()
    np.testing.assert_array_equal(got[..., 16:], x[..., 16:])
    check_rotated(got[:, ~outside], x[:, ~outside], rope, positions[~outside])


def test_what_is_not_rotated_keeps_its_bits(library):
    """NaN with its payload, infinities and denormals; and none of them reaches what is rotated."""
    x = drawn(1, 2, 3, 40, dtype="float16")
    bits = x.view(np.uint16)
    bits[..., 16:] = np.array([0x7E01, 0xFC00, 0x7C00, 0x0001, 0x8000, 0xFFFF] * 4, np.uint16)
    rope = qflash.Rope(*qflash.rope_tables(2, 16))
    got = rotated(library, placed(x), rope)
    np.testing.assert_array_equal(got.view(np.uint16)[..., 16:], bits[..., 16:])
    assert np.isfinite(got[..., :16]).all()


def test_empty_arrays(library):
    rope = qflash.Rope(*qflash.rope_tables(4, 8))
    for shape in ((0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)):
        x = np.zeros(shape, np.float32)
        assert rotated(library, x, rope, out=placed(x)).shape == shape


@pytest.mark.parametrize(
    "fields",
    [{"dtype": 1}, {"head_dim": 0}, {"rope.rotary_dim": 18}, {"rope.rotary_dim": 7}, {"rope.cos": None}],
    ids=str,
)
def test_what_it_does_not_serve_is_refused(library, fields):
    x = placed(drawn(1, 2, 2, 16))
    rope = qflash.Rope(*qflash.rope_tables(2, 16))
    with pytest.raises(qflash.NoKernelError, match=r"kernel 'rope' was built for another dtype.* or its tables"):
        rotated(library, x, rope, **fields)


# The rotation inside attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (40, 24), (13, 6)])
def test_attention_in_float32_rotates_to_the_same_bits(gpu, head_dim, rotary_dim, interleaved):
    q, k, v = drawn(3, 1, 20, 4, head_dim)
    tables = qflash.rope_tables(24, rotary_dim)
    positions = np.arange(-4, 16, dtype=np.int32)
    rope = qflash.Rope(*tables, interleaved, positions_q=positions, positions_k=positions[::-1].copy())
    fused = qflash.attention(q, k, v, rope=rope, kernel="fa")
    gpu.launched.clear()
    apart = [qflash.rope(x, rope, positions=at) for x, at in ((q, rope.positions_q), (k, rope.positions_k))]
    np.testing.assert_array_equal(qflash.attention(*apart, v, kernel="fa"), fused)
    assert gpu.launched == ["rope", "rope", "fa"]


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_in_16_bits_rotates_keys_to_the_same_bits(gpu, dtype, interleaved):
    """Queries stand at 0, where nothing is rotated: a kernel scales them before it rounds them."""
    q, k, v = drawn(3, 1, 20, 2, 64, dtype=dtype)
    rope = qflash.Rope(*qflash.rope_tables(20, 48), interleaved)
    still = qflash.Rope(rope.cos, rope.sin, interleaved, positions_q=np.zeros(20, np.int32))
    fused = qflash.attention(q, k, v, rope=still, kernel="fa_mma")
    np.testing.assert_array_equal(qflash.attention(q, qflash.rope(k, rope), v, kernel="fa_mma"), fused)
