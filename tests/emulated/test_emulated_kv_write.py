"""`kv_write` on the CPU against its replay, bit by bit: the pools, and the memory around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash.call.spec import DTYPES, KV_KINDS, OP_DTYPES
from qflash.errors import NoKernelError
from qflash.testing.page_writes import CASES, PageWrite, WriteArrays, arrays_of, check_written

_STRUCT = "QfKvWriteParams"


def fields_of(x: WriteArrays) -> dict:
    """The struct of a call, pools with any strides."""
    int8 = "k_scale" in x.pools
    *tokens, heads, dim = x.k.shape
    packed = x.cu_seqlens is not None
    stored = OP_DTYPES.index("int8" if int8 else x.k.dtype.name)
    fields = {
        "dtype": DTYPES.index(x.k.dtype.name), "batch": len(x.lens), "k_len": tokens[-1], "kv_heads": heads,
        "head_dim": dim, "columns": x.page_table.shape[1], "kv_lens": x.lens, "cu_seqlens_k": x.cu_seqlens,
        "total_k": tokens[0] if packed else 0,
        "kv.kind": KV_KINDS.index("pages_int8" if int8 else "pages"), "kv.k_dtype": stored, "kv.v_dtype": stored,
        "kv.page_table": x.page_table, "kv.page_table_stride": x.page_table.strides[0] // 4,
        "kv.k_mean": x.k_mean,
    }  # fmt: skip
    for name, pool in (("k", x.pools["k_pages"]), ("v", x.pools["v_pages"])):
        pool = pool.swapaxes(1, 2) if x.layout == "phtd" else pool
        fields |= {"kv.pages": pool.shape[0], "kv.page_size": pool.shape[1], f"kv.{name}.data": pool}
        fields |= {f"kv.{name}.stride_{dim}": pool.strides[at] // pool.itemsize for at, dim in enumerate("bth")}
        one = x.k if name == "k" else x.v
        strides = [stride // one.itemsize for stride in one.strides]
        fields |= {f"{name}.data": one, f"{name}.stride_t": strides[-3], f"{name}.stride_h": strides[-2]}
        fields |= {f"{name}.stride_b": 0 if packed else strides[0]}
        if int8:
            scale = x.pools[f"{name}_scale"]
            fields |= {f"kv.{name}_scales.scale": scale, f"kv.{name}_scales.group": 1}
            fields |= {f"kv.{name}_scales.stride_{dim}": scale.strides[at] // 4 for at, dim in enumerate("bh")}
    if x.rope is not None:
        positions = x.rope.positions_k
        fields |= {
            "rope.cos": x.rope.cos, "rope.sin": x.rope.sin, "rope.rows": len(x.rope.cos),
            "rope.rotary_dim": 2 * x.rope.cos.shape[1], "rope.interleaved": int(x.rope.interleaved),
            "rope.positions_k": positions,
            "rope.stride_positions_k_b": positions.shape[1] if positions is not None and positions.ndim == 2 else 0,
        }  # fmt: skip
    return fields


def run(library, x: WriteArrays, seed: int = 0, **changes) -> WriteArrays:
    """The call on the emulator, on pools of its own."""
    after = x.copied()
    kernel = library("kv_write_pages", x.k.dtype.name)
    kernel.launch_struct(_STRUCT, {**fields_of(after), **changes}, seed=seed)
    return after


def check(library, x: WriteArrays, **changes) -> WriteArrays:
    got = run(library, x, **changes)
    check_written(got, x.replay())
    return got


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_replays_bits(library, case):
    x = arrays_of(case)
    got = check(library, x)
    for name, before in x.around.items():  # and something was written
        assert (got.around[name].view(np.uint8) != before.view(np.uint8)).any(), name


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_every_page_size_and_head_dim(library, page_size, head_dim):
    for int8 in (False, True):
        lens = (page_size + 1, page_size, 2 * page_size)  # into a new page, to the end of one, over two
        case = PageWrite(
            "float16", int8, page_size, head_dim, 2, lens, (2, page_size, page_size + 1), "half", mean=int8
        )
        check(library, arrays_of(case))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("batch", [1, 31, 33, 70, 1100])
def test_which_sequence_a_packed_token_belongs_to(library, batch, int8):
    """With empty sequences among them, and so many that a warp's search takes three rounds."""
    rng = np.random.default_rng(batch)
    counts = rng.integers(0, 3, batch)
    counts[-1] = 1
    lens = tuple(int(n) for n in counts + rng.integers(0, 17, batch))
    case = PageWrite("float32", int8, lens=lens, new=tuple(map(int, counts)), head_dim=16, heads=1, seed=batch)
    check(library, arrays_of(case))


BAD_TABLES = {"negative": -1, "one past the pool": 18, "far": 2**31 - 1, "far below": -(2**31)}
BAD_LENS = {"fewer than are new": 2, "negative": -7, "past the table": 49, "far": 2**31 - 1, "far below": -(2**31)}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_page_that_is_not_there_is_not_written(library, name, packed, int8):
    x = arrays_of(PageWrite(int8=int8, lens=(33, 33), new=(20, 3) if packed else 20, rope="half"))
    assert x.page_table.shape == (2, 3) and len(x.pools["k_pages"]) == 18
    x.page_table[0, 1] = BAD_TABLES[name]
    check(library, x)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", BAD_LENS)
def test_tokens_without_a_place_are_not_written(library, name, packed, int8):
    x = arrays_of(PageWrite(int8=int8, lens=(40, 40), new=(5, 5) if packed else 5, rope="half"))
    x.lens[0] = BAD_LENS[name]
    assert x.page_table.shape == (2, 3)
    check(library, x)


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_of_padding_writes_nothing(library, int8):
    """Its length is 0; its pages, its tokens and their positions may be anything."""
    x = arrays_of(PageWrite(int8=int8, rope="half", positions=True))
    x.lens[1], x.page_table[1] = 0, -1
    x.k[1], x.v[1], x.rope.positions_k[1] = np.nan, np.nan, 2**31 - 1
    check(library, x)
    x.page_table[1] = x.page_table[0]  # a page of another sequence
    check(library, x)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("empty", ["pages", "columns"])
def test_arrays_without_elements_have_no_address(library, empty, int8):
    """In PyTorch. Nothing has a place there."""
    x = arrays_of(PageWrite(int8=int8))
    x.lens[:] = 0
    pools = ("kv.k.data", "kv.v.data", *(("kv.k_scales.scale", "kv.v_scales.scale") if int8 else ()))
    nothing = {"kv.pages": 0, **dict.fromkeys(pools)} if empty == "pages" else {"columns": 0, "kv.page_table": None}
    after = run(library, x, **nothing)
    for name, before in x.around.items():
        np.testing.assert_array_equal(after.around[name].view(np.uint8), before.view(np.uint8))


BAD_OFFSETS = {
    "past the tokens": [0, 5, 11],
    "far past": [0, 5, 2**31 - 1],
    "below 0": [-3, 5, 10],
    "falling": [0, 8, 5],
    "all past": [20, 30, 40],
    "fewer than tokens": [2, 4, 6],
}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_bad_offsets_write_nothing_outside_the_pages_of_the_batch(library, name, int8):
    x = arrays_of(PageWrite(int8=int8, lens=(40, 40), new=(5, 5)))
    x.cu_seqlens[:] = BAD_OFFSETS[name]
    got = run(library, x)
    owned = np.isin(np.arange(len(x.pools["k_pages"])), x.page_table)
    for pool, before in x.pools.items():
        np.testing.assert_array_equal(got.pools[pool][~owned], before[~owned])
        for side in (0, -1):
            np.testing.assert_array_equal(got.around[pool][side], x.around[pool][side])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("int8", [False, True])
def test_tokens_that_are_not_finite(library, int8, value):
    """Their scales are NaN; their neighbours are what they are without them."""
    x = arrays_of(PageWrite("float16", int8, rope="half" if int8 else None, mean=int8))
    x.k[0, 1, 0, 63] = x.v[1, 2, 1, 0] = value
    got = check(library, x)
    if int8:
        assert [int(np.isnan(got.pools[name]).sum()) for name in ("k_scale", "v_scale")] == [1, 1]


def test_a_nan_with_a_payload_leaves_none_of_it_in_the_integers(library):
    x = arrays_of(PageWrite("float32", int8=True))
    x.v.view(np.uint32)[0, 0, 0, 5] = 0x7FC0_1234
    check(library, x)


@pytest.mark.parametrize("int8", [False, True])
def test_positions_outside_the_tables_make_the_token_nan(library, int8):
    case = PageWrite("float32", int8, rope="partial", positions=True)
    x = arrays_of(case)
    rows = len(x.rope.cos)
    x.rope.positions_k[0] = [rows, -rows, 2**31 - 1]
    x.rope.positions_k[1] = [-(2**31), rows - 1, 1 - rows]
    check(library, x)


VALUES = [0.0, -0.0, 2.0**-101, 2.0**-100, 1e-40, 3.4e38]


@pytest.mark.parametrize("value", VALUES)
def test_amplitudes(library, value):
    x = arrays_of(PageWrite("float32", int8=True))
    x.k[...], x.v[...] = value, -value
    x.k[..., 1::2] = 0
    check(library, x)


@pytest.mark.parametrize("rope", ["partial", "partial_interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_that_the_rope_leaves_alone_keep_their_bits(library, dtype, rope):
    x = arrays_of(PageWrite(dtype, rope=rope, rotary_dim=6))
    x.k[..., 6:] = -0.0
    check(library, x)


@pytest.mark.parametrize("int8", [False, True])
def test_strides(library, int8):
    """Tokens and pools out of larger arrays, at addresses that no vector could be read from."""
    x = arrays_of(PageWrite("float16", int8, rope="half", mean=int8))
    wide = np.full((3, 5, 4, 67), np.nan, np.float16)
    wide[:, :3, 1:3, 1:65] = x.k
    replaced = replace(x, k=wide[:, :3, 1:3, 1:65])
    check(library, replaced)
    around = {}
    for name, pool in x.around.items():
        if pool.ndim == 4:
            room = np.zeros((len(pool), 3, 20, 71), pool.dtype)
            room[:, 1:, 2:18, 3:67] = pool
            pool = room[:, 1:, 2:18, 3:67]
        around[name] = pool
    after = replace(replaced, around=around)
    wanted = x.replay()
    library("kv_write_pages", "float16").launch_struct(_STRUCT, fields_of(after))
    check_written(replace(after, around={name: np.ascontiguousarray(pool) for name, pool in around.items()}), wanted)


def test_the_order_of_blocks_does_not_matter(library):
    x = arrays_of(PageWrite("bfloat16", int8=True, head_dim=128, heads=8, rope="half", mean=True))
    for seed in range(5):
        check_written(run(library, x, seed=seed), x.replay())


@pytest.mark.parametrize("new", [0, (0, 0, 0)])
def test_no_tokens(library, new):
    x = arrays_of(PageWrite(new=new))
    check_written(run(library, x), x)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": 0}, {"kv.kind": 0}, {"kv.k_dtype": 3}, {"head_dim": 0}, {"head_dim": 257}, {"kv.page_size": 0},
     {"kv_lens": None}, {"kv.page_table": None}, {"kv_heads": 0}],
    ids=str,
)  # fmt: skip
def test_what_it_does_not_serve_is_refused(library, changes):
    x = arrays_of(PageWrite())
    with pytest.raises(NoKernelError, match="kernel 'kv_write' was built for another dtype"):
        run(library, x, **changes)


def test_int8_pages_take_whole_blocks_of_channels(library):
    x = arrays_of(PageWrite(int8=True, head_dim=64))
    with pytest.raises(NoKernelError, match="kernel 'kv_write'"):
        run(library, x, head_dim=56)
    with pytest.raises(NoKernelError, match="kernel 'kv_write'"):
        run(library, x, **{"kv.k_scales.scale": None})
