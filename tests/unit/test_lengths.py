"""qflash.call.lengths: what is taken for kv_lens, cu_seqlens and positions where the values are on the host."""

import numpy as np
import pytest

from qflash.call.lengths import lengths

EDGES = [-(2**31), -1, 0, 2**31 - 1]


@pytest.mark.parametrize(
    "value",
    [
        [3, 5],
        (3, 5),
        [np.int64(3), np.uint8(5)],
        [[1, 2, 3], (4, 5, 6)],
        [],
        [[], []],
        EDGES,
    ],
    ids=str,
)
def test_lists_and_tuples(value):
    result = lengths("kv_lens", value)
    assert result.dtype == np.int32 and result.flags.c_contiguous
    assert result.shape == np.array(value).shape
    assert result.tolist() == np.array(value, np.int64).tolist()


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4", ">i8"]
)
def test_numpy_integers(dtype):
    value = np.arange(12, dtype=dtype).reshape(3, 4)
    for array in (value, value[:, ::2], value.T, value[:0], value[0, 0:1].reshape(())):
        result = lengths("rope.positions_q", array)
        assert result.dtype == np.dtype(np.int32) and result.dtype.isnative and result.flags.c_contiguous
        assert result.shape == array.shape
        np.testing.assert_array_equal(result, array)


def test_int32_is_not_copied():
    value = np.arange(4, dtype=np.int32)
    assert lengths("kv_lens", value) is value


def test_the_edges_of_int32_as_int64():
    np.testing.assert_array_equal(lengths("kv_lens", np.array(EDGES, np.int64)), EDGES)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63 - 1], ids=str)
def test_a_value_outside_int32_is_named(value):
    text = rf"^kv_lens contains {value}; allowed: what int32 holds, -2147483648 to 2147483647$"
    for container in ([1, value], (value,), [[1], [value]], np.array([1, value], np.int64)):
        with pytest.raises(ValueError, match=text):
            lengths("kv_lens", container)


def test_a_value_outside_every_numpy_integer():
    with pytest.raises(ValueError, match=rf"^cu_seqlens_q contains {2**80}; allowed: what int32 holds"):
        lengths("cu_seqlens_q", [0, 2**80])
    with pytest.raises(ValueError, match=rf"^cu_seqlens_q contains {2**64 - 1}; allowed: what int32 holds"):
        lengths("cu_seqlens_q", np.array([0, 2**64 - 1], np.uint64))


@pytest.mark.parametrize("entry", [True, np.True_, 1.0, np.float32(2), "3", None, 1j], ids=repr)
def test_entries_that_are_no_ints(entry):
    with pytest.raises(TypeError, match=r"^kv_lens contains .*; allowed: ints$"):
        lengths("kv_lens", [1, entry])


@pytest.mark.parametrize("dtype", [bool, np.float32, np.complex64, object, "U1", "datetime64[s]"], ids=str)
def test_arrays_that_are_no_integers(dtype):
    with pytest.raises(TypeError, match=r"^kv_lens has dtype \w+(\[s\])?; allowed: an integer dtype$"):
        lengths("kv_lens", np.zeros(2, dtype))


def test_ragged_lists():
    with pytest.raises(ValueError, match=r"^rope\.positions_k is a ragged list .*\[2\] beside \[1\].*allowed: entries"):
        lengths("rope.positions_k", [[1, 2], [3]])
    with pytest.raises(ValueError, match=r"^kv_lens is a ragged list .*a number beside \[1\]"):
        lengths("kv_lens", [1, [2]])


def test_masked_arrays_and_other_objects():
    with pytest.raises(TypeError, match=r"^kv_lens is a masked array; allowed"):
        lengths("kv_lens", np.ma.array([1, 2], mask=[0, 1]))
    with pytest.raises(TypeError, match=r"^kv_lens is builtins\.int; allowed: a list or tuple of ints"):
        lengths("kv_lens", 7)
    with pytest.raises(TypeError, match=r"^kv_lens is builtins\.str; allowed: a list or tuple of ints"):
        lengths("kv_lens", "12")
    with pytest.raises(TypeError, match=r"^kv_lens is builtins\.range; allowed"):
        lengths("kv_lens", range(2))
