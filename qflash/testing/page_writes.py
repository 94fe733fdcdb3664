"""Calls of `paged_write` in NumPy arrays, with guard memory around the pools, and their expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np

from qflash.ops.paged import PagedKV
from qflash.reference import kv_write
from qflash.rotary import Rope, rope_tables
from qflash.testing.runner import to_numpy

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_ROPES = {"half": (1, False), "interleaved": (1, True), "partial": (2, False), "partial_interleaved": (2, True)}


@dataclass(frozen=True)
class PageWrite:
    """lens includes the new tokens; `new`: the number per sequence, or a tuple of numbers for packed tokens."""

    dtype: str = "bfloat16"
    int8: bool = False
    page_size: int = 16
    head_dim: int = 64
    heads: int = 2
    lens: tuple[int, ...] = (5, 40, 17)
    new: int | tuple[int, ...] = 3
    rope: str | None = None  # one of _ROPES
    rotary_dim: int = 0  # 0: head_dim, or half of it if the rope is partial
    positions: bool = False
    mean: bool = False
    layout: str = "phtd"
    seed: int = 0

    @property
    def packed(self) -> bool:
        return isinstance(self.new, tuple)

    def __str__(self) -> str:
        """The differences from the plainest case, as a test's name."""
        plain = PageWrite()
        words = [self.dtype, f"d{self.head_dim}", f"p{self.page_size}"]
        words += ["int8"] * self.int8 + ["packed"] * self.packed + [self.rope] * bool(self.rope)
        words += ["positions"] * self.positions + ["mean"] * self.mean
        words += [f"{name}{getattr(self, name)}" for name in ("rotary_dim", "heads", "layout", "seed")
                  if getattr(self, name) != getattr(plain, name)]  # fmt: skip
        return "-".join(map(str, words))


@dataclass
class WriteArrays:
    """The arrays of one call. A pool is the interior of `around`, which has one more page on either side."""

    around: dict[str, np.ndarray]  # k_pages, v_pages; k_scale, v_scale of int8 pages
    page_table: np.ndarray
    lens: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_mean: np.ndarray | None = None
    rope: Rope | None = None
    cu_seqlens: np.ndarray | None = None
    layout: str = "phtd"
    pools: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.pools = {name: x[1:-1] for name, x in self.around.items()}

    def copied(self) -> WriteArrays:
        """The same call on copies of the pools."""
        around = {name: x.copy() for name, x in self.around.items()}
        others = (self.page_table, self.lens, self.k, self.v, self.k_mean, self.rope, self.cu_seqlens, self.layout)
        return WriteArrays(around, *others)

    def replay(self) -> WriteArrays:
        """The expected pools after the call, from the reference."""
        after = self.copied()
        pools = {
            name: x.swapaxes(1, 2) if self.layout == "pthd" and x.ndim == 4 else x for name, x in after.pools.items()
        }
        words = {"k_mean": self.k_mean, "rope": self.rope, "cu_seqlens": self.cu_seqlens}
        kv_write.write_pages(
            pools.pop("k_pages"), pools.pop("v_pages"), self.page_table, self.lens, self.k, self.v, **pools, **words
        )
        return after


def arrays_of(case: PageWrite) -> WriteArrays:
    """Random tokens, pages assigned in random order from three times as many as needed, pools of other values."""
    rng = np.random.default_rng(case.seed)
    dtype = _DTYPES[case.dtype]
    batch, width, page = len(case.lens), case.head_dim, case.page_size
    columns = max(1, -(-max(case.lens, default=1) // page))
    pages = 3 * batch * columns
    table = rng.permutation(pages)[: batch * columns].reshape(batch, columns).astype(np.int32)
    inside = (case.heads, page) if case.layout == "phtd" else (page, case.heads)
    around = {}
    for name in ("k_pages", "v_pages"):
        shape = (pages + 2, *inside, width)
        around[name] = rng.integers(-128, 128, shape, np.int8) if case.int8 else rng.normal(size=shape).astype(dtype)
    if case.int8:
        for name in ("k_scale", "v_scale"):
            around[name] = rng.normal(size=(pages + 2, case.heads, page)).astype(np.float32)
    counts = case.new if isinstance(case.new, tuple) else (case.new,) * batch
    total = sum(counts)
    tokens = (total,) if case.packed else (batch, counts[0] if counts else 0)
    k, v = (rng.normal(size=(*tokens, case.heads, width)).astype(dtype) for _ in range(2))
    cu_seqlens = np.array([0, *accumulate(counts)], np.int32) if case.packed else None
    k_mean = rng.normal(size=(case.heads, width)).astype(np.float32) if case.mean else None
    rope = None
    if case.rope is not None:
        parts, interleaved = _ROPES[case.rope]
        rows = max(case.lens, default=1) + 8
        cos, sin = rope_tables(rows, case.rotary_dim or width // parts)
        places = rng.integers(1 - rows, rows, tokens).astype(np.int32) if case.positions else None
        rope = Rope(cos, sin, interleaved=interleaved, positions_k=places)
    lens = np.array(case.lens, np.int32)
    return WriteArrays(around, table, lens, k, v, k_mean, rope, cu_seqlens, case.layout)


def check_written(got: WriteArrays, wanted: WriteArrays) -> None:
    """Check for the same bits in and around every pool; all NaNs are equal."""
    for name, theirs in wanted.around.items():
        mine = got.around[name]
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        bits = f"u{theirs.itemsize}"
        same = mine.view(bits) == theirs.view(bits)
        if theirs.dtype.kind != "i":
            same |= np.isnan(mine.astype(np.float32)) & np.isnan(theirs.astype(np.float32))
        assert same.all(), f"{name}: {(~same).sum()} of {same.size} differ, first at {np.argwhere(~same)[0].tolist()}"


def on_device(x: WriteArrays, turn: Callable[[np.ndarray], Any] = np.asarray) -> PagedKV:
    """The pages of a call in any framework. turn: from NumPy's arrays to its own."""
    pools = {name: turn(pool) for name, pool in x.pools.items()}
    mean = None if x.k_mean is None else turn(x.k_mean)
    return PagedKV(**pools, page_table=turn(x.page_table), lens=turn(x.lens), k_mean=mean, layout=x.layout)


def words_of(x: WriteArrays, turn: Callable[[np.ndarray], Any] = np.asarray) -> dict[str, Any]:
    """The keyword arguments of a call in any framework."""
    rope = x.rope
    if rope is not None:
        given = {one.name: getattr(rope, one.name) for one in fields(rope)}
        rope = Rope(**{name: turn(y) if isinstance(y, np.ndarray) else y for name, y in given.items()})
    return {"rope": rope, "cu_seqlens": None if x.cu_seqlens is None else turn(x.cu_seqlens)}


def check_pools(kv: PagedKV, wanted: WriteArrays) -> None:
    """Check pages of any framework against those from the replay."""
    got = wanted.copied()
    for name, pool in got.pools.items():
        pool[...] = to_numpy(getattr(kv, name))
    check_written(got, wanted)


# Every dtype, page size, head_dim, kind of rope and form of new tokens, but not all combinations.
CASES = (
    PageWrite(),
    PageWrite("float32", page_size=64, head_dim=128, rope="half", new=(1, 0, 12)),
    PageWrite("float16", page_size=256, head_dim=80, rope="interleaved", lens=(300, 40, 257)),
    PageWrite("bfloat16", head_dim=256, rope="partial", positions=True, layout="pthd"),
    PageWrite("float16", head_dim=100, heads=3, rope="half", new=(4, 7, 1)),
    PageWrite("float32", head_dim=17, heads=1, lens=(9,), new=9),
    PageWrite("float32", head_dim=24, rope="partial_interleaved", rotary_dim=6, new=(2, 2, 2), positions=True),
    PageWrite("bfloat16", head_dim=64, rope="partial", rotary_dim=20),
    PageWrite("bfloat16", int8=True, head_dim=128, rope="half", mean=True),
    PageWrite("float16", int8=True, page_size=64, head_dim=80, heads=5, rope="half", mean=True, new=(5, 2, 17)),
    PageWrite("float32", int8=True, page_size=256, head_dim=256, rope="interleaved", layout="pthd", lens=(259, 5)),
    PageWrite("float16", int8=True, head_dim=64, mean=True, new=(0, 40, 1)),
    PageWrite("bfloat16", int8=True, head_dim=16, heads=1, rope="partial", rotary_dim=6, positions=True, mean=True),
    PageWrite("float32", int8=True, head_dim=64),
)
