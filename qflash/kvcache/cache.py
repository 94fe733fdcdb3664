"""qflash.KVCache: keys and values of many sequences in pages, for NumPy, PyTorch and JAX."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from threading import RLock
from typing import Any, Literal

from qflash.call.words import INT32_MAX, check_int, check_word, shown
from qflash.kvcache.pages import Pages
from qflash.kvcache.step import State, Step
from qflash.kvcache.storage import make_storage
from qflash.ops.paged import HADAMARD
from qflash.ops.problem import MAX_HEAD_DIM
from qflash.typing import Integer

PAGE_SIZES = (16, 32, 64, 128, 256)


class KVCache:
    """Paged KV cache: keys and values of many sequences in pages of `page_size` tokens, allocated as sequences grow.

    Args:
        layers: number of layers of the model; a sequence has the same pages in each.
        kv_heads: heads of k and v.
        head_dim: channels per head; a multiple of 16 with precision "int8".
        pages: number of pages for all sequences together.
        page_size: tokens per page: 16, 32, 64, 128 or 256.
        dtype: dtype of k and v, which also selects the framework: `np.float32`, `torch.bfloat16`, `jnp.bfloat16`. The
            dtype of a JAX array is a NumPy dtype; write `jnp.bfloat16`. On a GPU attention supports only pages of
            16-bit dtypes.
        precision: None stores `dtype`. "int8" stores a byte for each value, and a scale for each token and head.
        device: where the pages are: a torch device, or a `jax.Device`; None is the framework's default.

    `open` creates a sequence and returns its number, a small integer. `extend` reserves pages for new tokens of some
    sequences, `Step.write` stores a layer's keys and values there and returns a `PagedKV` for `attention`. `fork`
    shares pages between sequences, `truncate` and `close` free them. All methods may be called from several threads.

    A token that was reserved but never written contains whatever its page contained before. If something fails between
    `extend` and the last `write`, call `truncate` with the previous length, or `close`.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> cache = qflash.KVCache(layers=1, kv_heads=2, head_dim=64, pages=8, page_size=16, dtype=np.float32)
        >>> a, b = cache.open(), cache.open()
        >>> step = cache.extend([a, b], [20, 3])
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 23, 2, 64), np.float32)
        >>> kv = step.write(0, k, v)
        >>> out = qflash.attention_varlen(q, kv, None, step.cu_seqlens, None, step.max_new, None, causal=True)
        >>> out.shape, cache.length(a), cache.free_pages
        ((23, 2, 64), 20, 5)
        >>> step = cache.extend([a, b], 1)  # one token more of each
        >>> kv = step.write(0, k[:2, None], v[:2, None])
        >>> qflash.attention(q[:2, None], kv, causal=True).shape
        (2, 1, 2, 64)
    """

    layers: int
    kv_heads: int
    head_dim: int
    pages: int
    page_size: int
    dtype: Any
    precision: Literal["int8"] | None
    device: Any

    def __init__(
        self,
        *,
        layers: Integer,
        kv_heads: Integer,
        head_dim: Integer,
        pages: Integer,
        page_size: Integer = 256,
        dtype: Any,
        precision: Literal["int8"] | None = None,
        device: Any = None,
    ) -> None:
        self.layers = check_int("layers", layers, 1, INT32_MAX)
        self.kv_heads = check_int("kv_heads", kv_heads, 1, INT32_MAX)
        self.head_dim = check_int("head_dim", head_dim, 1, MAX_HEAD_DIM)
        self.pages = check_int("pages", pages, 1, INT32_MAX)
        self.page_size = check_int("page_size", page_size, -INT32_MAX, INT32_MAX)
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size is {page_size}; allowed: {', '.join(map(str, PAGE_SIZES))}")
        if precision is not None:
            check_word("precision", precision, (None, "int8"))
            if self.head_dim % HADAMARD:
                raise ValueError(f"head_dim is {head_dim}; allowed: a multiple of {HADAMARD} with precision 'int8'")
        self.dtype, self.precision = dtype, precision
        storage = make_storage(
            dtype,
            device,
            layers=self.layers,
            pages=self.pages,
            kv_heads=self.kv_heads,
            page_size=self.page_size,
            head_dim=self.head_dim,
            is_int8=precision is not None,
        )
        self.device = storage.device
        self._pages = Pages(self.pages, self.page_size)
        self._lock = RLock()
        self._state = State(storage.shape, self._pages, storage, self._lock, [precision is None] * self.layers)

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence uses."""
        with self._lock:
            return self._pages.free

    def open(self) -> int:
        """Create a sequence without tokens. Its number is never reused, so that a closed sequence is recognised."""
        with self._lock:
            return self._pages.open()

    def fork(self, seq: Integer) -> int:
        """Create a sequence with the tokens of `seq`, sharing its pages.

        Full pages stay shared. The last one, if it is not full, is copied when either of the two sequences is extended,
        so fork after the writes of a step.
        """
        name = _sequence("seq", seq)
        with self._lock:
            return self._pages.fork(name)

    def truncate(self, seq: Integer, n: Integer) -> None:
        """Keep only the first `n` tokens of a sequence, at most all it has. Nothing is copied."""
        name, length = _sequence("seq", seq), check_int("n", n, 0, INT32_MAX)
        with self._lock:
            self._pages.truncate(name, length)

    def close(self, seq: Integer) -> None:
        """Close a sequence, and free the pages that it does not share."""
        name = _sequence("seq", seq)
        with self._lock:
            self._pages.close(name)

    def length(self, seq: Integer) -> int:
        """The number of tokens of a sequence, including reserved ones."""
        name = _sequence("seq", seq)
        with self._lock:
            return self._pages.find(name).length

    def pages_of(self, seq: Integer) -> list[int]:
        """The pages of a sequence: its token t is token t % page_size of page t // page_size of the list."""
        name = _sequence("seq", seq)
        with self._lock:
            return list(self._pages.find(name).pages)

    def extend(
        self,
        seqs: Iterable[Integer],
        n: Integer | Iterable[Integer],
        *,
        into: Step | None = None,
        columns: Integer | None = None,
    ) -> Step:
        """Reserve pages for `n` new tokens of each sequence: for all, or raise OutOfPagesError and change nothing.

        Args:
            seqs: sequences, each once.
            n: number of new tokens for each sequence, or one int for all.
            into: a step for as many sequences or more, to renew. Its tables keep their shapes, and in PyTorch and NumPy
                their addresses: a CUDA graph captured with them stays valid. Rows after those of `seqs` are padding,
                for which nothing is written and attention returns zeros.
            columns: number of pages per sequence that the tables of a new step have room for, if it is to be renewed as
                sequences grow. Default: the number that the longest of `seqs` needs now.

        Returns:
            A `Step`, which writes the tokens and returns what `attention` takes. Earlier steps of these sequences
            become stale.
        """
        names = _distinct([_sequence("seqs", seq, "has") for seq in _listed("seqs", seqs, "a list of ints")])
        counts = _counts(n, len(names))
        if into is not None:
            self._check_into(into, columns)
        room = None if columns is None else check_int("columns", columns, 1, INT32_MAX // self.page_size)
        with self._lock:
            reservation = self._pages.reserve(names, counts)
            most = max(map(len, reservation.pages))
            step = into if into is not None else Step(self._state, len(names), room or max(most, 1))
            step._check_fits(reservation)
            # Everything that may fail precedes the commit: copies go to pages that are still free, and only this step
            # has these tables.
            self._state.storage.copy_pages(reservation.copies)
            step._show(reservation)
            self._pages.commit(reservation)
            step._commit(reservation)
        return step

    def __repr__(self) -> str:
        with self._lock:
            free, sequences = self._pages.free, self._pages.open_sequences
        return f"<qflash KVCache, {free} of {self.pages} pages of {self.page_size} tokens free, {sequences} sequences>"

    def _check_into(self, into: Any, columns: Any) -> None:
        if not isinstance(into, Step):
            raise TypeError(f"into is {shown(into)}; allowed: None or a step that extend returned")
        if into._state is not self._state:
            raise ValueError("into is a step of another cache; allowed: one that this cache's extend returned")
        if columns is not None:
            raise ValueError(f"columns is {shown(columns)} and into is given; allowed: None, into has {into.columns}")


def _sequence(name: str, value: Any, verb: str = "is") -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} {verb} {shown(value)}; allowed: sequences, ints that open() and fork() returned")
    return int(value)


def _listed(name: str, values: Any, allowed: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} is {shown(values)}; allowed: {allowed}") from None


def _distinct(names: list[int]) -> list[int]:
    if not names:
        raise ValueError("seqs is empty; allowed: one sequence or more")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"seqs has sequence {twice} {names.count(twice)} times; allowed: each sequence once")
    return names


def _counts(n: Any, sequences: int) -> list[int]:
    """The number of new tokens for each sequence."""
    if isinstance(n, Integral):
        counts = [check_int("n", n, 0, INT32_MAX)] * sequences
    else:
        counts = [check_int("n", count, 0, INT32_MAX) for count in _listed("n", n, "an int, or a list of ints")]
        if len(counts) != sequences:
            raise ValueError(
                f"n has {len(counts)} counts; allowed: one for each of the {sequences} sequences, or an int"
            )
    if sum(counts) > INT32_MAX:
        raise ValueError(f"n is {sum(counts)} tokens in all; allowed: up to {INT32_MAX}")
    return counts
