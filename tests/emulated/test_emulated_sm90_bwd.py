"""`sm90_bwd` run on the CPU, thread by thread: what its own tiles, rings and roles could get wrong beyond the case list
(test_emulated_backward.py), in any order that warps may run in."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from qflash import reference
from qflash.testing import Case
from qflash.testing.case import Rotary
from qflash.testing.compare import GRADIENT_L2, check_gradients, check_same_bits, errors
from qflash.testing.emulated_backward import NAMES, check_gradients_of, run_gradients

KERNEL = "sm90_bwd"
HEAD_DIMS = [
    (64, "float16"), (64, "bfloat16"), (72, "float16"), (96, "bfloat16"), (104, "float16"), (128, "bfloat16"),
    (184, "bfloat16"), (256, "float16"),
]  # fmt: skip
MASKS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "left": {"window": (40, -1)},
    "softcap": {"causal": True, "softcap": 4.0},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "dtype"), HEAD_DIMS)
def test_every_tile_shape_under_every_mask(library, head_dim, dtype, mask):
    """Several work tiles of either kernel for each block, with groups of heads and lengths that no tile divides."""
    case = Case("tiles", 146, 230, 4, 2, head_dim, dtype=dtype, seed=head_dim, **MASKS[mask])
    check_gradients_of(library, case, KERNEL)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(96, "bfloat16"), (128, "float16"), (256, "float16")])
def test_every_tile_shape_without_memory_for_dS(library, head_dim, dtype, mask):
    """dQ from S and dP, computed again."""
    case = Case("again", 146, 230, 4, 2, head_dim, dtype=dtype, seed=head_dim, **MASKS[mask])
    check_gradients_of(library, case, KERNEL, memory=0)


@lru_cache(maxsize=8)
def in_one_order(library, case: Case, memory: int):
    """Gradients within the contract."""
    found = run_gradients(library, case, KERNEL, seed=100, memory=memory)
    check_gradients(case, *found)
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("head_dim", "memory"), [(64, 0), (128, 0), (128, 1 << 30), (192, 1 << 30)])
def test_whoever_is_slow(library, head_dim, memory, seed):
    """Tiles that one consumer skips, work tiles of one step and of many: whichever warp falls behind must miss no phase
    of a barrier, and no turn."""
    case = Case("slow", 300, 400, 3, 1, head_dim, causal=True, dtype="bfloat16", seed=1)
    got = run_gradients(library, case, KERNEL, seed=seed, memory=memory)
    check_same_bits(case, in_one_order(library, case, memory), got, names=NAMES)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_work_tiles_without_columns(library, head_dim):
    """However many come in a row, between some that have columns; rows that nobody meets are zeros."""
    none, more = (0,) * 9, (3, 0, 200, 1, 64, 0, 130, 7, 20)
    packed = {"q_lens": (70, *more, 150, *none, *more), "k_lens": (150, *none, 300, *more, *none)}
    for case in (
        Case("packed", **packed, causal=True),
        Case("padded", 200, 150, 3, 1, batch=9, kv_lens=(0, 0, 0, 0, 0, 150, 0, 0, 0)),
        Case("first_rows", 1000, 100, 1, 1, causal=True),
        Case("last_keys", 20, 900, 1, 1, window=(30, 0)),
    ):
        check_gradients_of(library, replace(case, head_dim=head_dim, dtype="float16"), KERNEL)


@pytest.mark.parametrize(
    "rope", [Rotary(64), Rotary(128), Rotary(128, True), Rotary(40), Rotary(50, True), Rotary(2), Rotary(12)]
)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_rope_of_any_width(library, rope, head_dim):
    """Pairs within a lane, and pairs that meet in shared memory."""
    case = Case("rope", 70, 90, 2, 1, head_dim, dtype="float16", causal=True, rope=rope)
    check_gradients_of(library, case, KERNEL)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window": (30, 10)}])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_what_is_not_finite_in_dout_reaches_who_sees_it(library, head_dim, words, value):
    """dV in its channel, dK and dQ of what the row sees in all channels, and nothing else: also where a tile is seen in
    part. Of an infinity it is left open whether dK is infinite or NaN."""
    case = Case("dout", 150, 200, 2, 1, head_dim, dtype="bfloat16", seed=3, **words)
    dout, dlse = case.make_gradients()
    dout[0, 77, 1, 5] = dout[0, 140, 0, 9] = float(value)
    inputs = case.make_inputs()
    with np.errstate(invalid="ignore"):  # infinities of both signs add up
        want = reference.attention_backward(inputs.q, inputs.k, inputs.v, dout, dlse, **case.options())
    got = run_gradients(library, case, KERNEL, changes={"dout": dout})
    for name, x, y in zip(NAMES, got, want, strict=True):
        np.testing.assert_array_equal(np.isfinite(x.astype(np.float32)), np.isfinite(y), err_msg=name)
        assert errors(x, y).relative_l2 <= GRADIENT_L2["bfloat16"], name
    assert np.isfinite(want[1]).any() or not words


def test_small_gradients_in_float16(library):
    """Weights of long rows times small gradients: float16 would hold few of their digits, or none."""
    case = Case("small", 64, 2000, 1, 1, 64, dtype="float16", seed=2)
    dout, _ = case.make_gradients()
    inputs = case.make_inputs()
    dout = (dout.astype(np.float32) * 2.0**-6).astype(np.float16)
    zero = np.zeros((1, 1, 64), np.float32)
    want = reference.attention_backward(inputs.q, inputs.k, inputs.v, dout, zero, **case.options())
    got = run_gradients(library, case, KERNEL, changes={"dout": dout, "dlse": zero})
    for name, x, y in zip(NAMES, got, want, strict=True):
        # what the type itself leaves of the result
        least = errors(y.astype(np.float16), y).relative_l2
        assert errors(x, y).relative_l2 <= 2 * GRADIENT_L2["float16"] + 2 * least, name


@pytest.mark.parametrize("odd", ["q", "k", "v", "dout", "all"])
def test_odd_addresses_are_copied(library, odd):
    """The copy engine reads from whole 16 bytes; nobody can plan for tensors that begin elsewhere."""
    case = Case("odd", 150, 200, 2, 1, 64, dtype="float16", causal=True)
    inputs = case.make_inputs()
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": case.make_gradients()[0]}
    shifted = {name: beginning_at(x, 2 if odd in (name, "all") else 0) for name, x in tensors.items()}
    want = run_gradients(library, case, KERNEL)
    check_same_bits(case, want, run_gradients(library, case, KERNEL, changes=shifted), names=NAMES)


def beginning_at(x: np.ndarray, byte: int) -> np.ndarray:
    """A copy that begins `byte` bytes past a whole 16."""
    memory = np.empty(x.size + 16, x.dtype)
    shift = (-memory.ctypes.data % 16 + byte) // x.itemsize
    copy = memory[shift : shift + x.size].reshape(x.shape)
    copy[:] = x
    assert copy.ctypes.data % 16 == byte
    return copy
