"""Attention on sequences that share their first pages: the prefix is read once for all of them.

It takes three calls: attention of all queries on the prefix, as queries of one sequence; attention of each sequence on
its other keys; and `merge`. All queries come after the prefix, so nothing in it is masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Generic

import numpy as np

from qflash.call.words import check_int
from qflash.ops.merge import MERGE
from qflash.ops.paged import ATTENTION_PAGED, PagedKV, paged_call
from qflash.ops.problem import Options
from qflash.ops.run import run
from qflash.rotary import Rope
from qflash.typing import ArrayT_co, Flag, Integer


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixKV(Generic[ArrayT_co]):
    """A PagedKV whose sequences share their first pages. Returned by `share_prefix`; pass it as `attention(q, kv)`.

    Args:
        whole: the PagedKV itself.
        prefix: one sequence with the shared pages, or None.
        rest: each sequence without the shared pages.
        last: int32 `[B]`, the position of each sequence's last token.

    It is valid for the lengths that the PagedKV had: a renewed step needs another `share_prefix`.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> pools = np.zeros((2, 4, 2, 16, 64), np.float32)
        >>> table = np.array([[3, 0], [3, 1]], np.int32)  # both begin with page 3
        >>> kv = qflash.share_prefix(qflash.PagedKV(*pools, table, lens=np.array([20, 17], np.int32)), 1)
        >>> kv.prefix.lens, kv.rest.lens
        (array([16], dtype=int32), array([4, 1], dtype=int32))
    """

    whole: PagedKV[ArrayT_co]
    prefix: PagedKV[ArrayT_co] | None
    rest: PagedKV[ArrayT_co]
    last: ArrayT_co

    def __post_init__(self) -> None:
        if type(self.last).__module__.partition(".")[0] in ("jax", "jaxlib"):  # see PagedKV
            import qflash.frontends.jax  # noqa: F401

    def of(self, kv: PagedKV[ArrayT_co]) -> SharedPrefixKV[ArrayT_co]:
        """The same sequences in the pools of `kv`, which is another layer of the same step. Creates no arrays."""
        if _page_size(kv) != self.whole.page_size:
            raise ValueError(f"kv has pages of {kv.page_size} tokens; allowed: another layer's, {self.whole.page_size}")

        def pools_of(tables: PagedKV[ArrayT_co]) -> PagedKV[ArrayT_co]:
            return replace(kv, page_table=tables.page_table, lens=tables.lens)

        prefix = None if self.prefix is None else pools_of(self.prefix)
        return SharedPrefixKV(pools_of(self.whole), prefix, pools_of(self.rest), self.last)


def share_prefix(kv: PagedKV[ArrayT_co], pages: Integer) -> SharedPrefixKV[ArrayT_co]:
    """Prepare kv for `attention` calls that read the first `pages` pages, shared by all its sequences, only once.

    Args:
        kv: the pages.
        pages: number of leading columns of `kv.page_table` that are the same in every row, as made by `KVCache.fork`
            and counted by `Step.shared_pages`; 0 shares nothing. Every sequence must have these tokens, followed by at
            least as many as there are queries: kernels do not check this, and only NumPy tables are checked here.

    Returns:
        A `SharedPrefixKV`, for which three small arrays are created; `SharedPrefixKV.of` uses them for other layers.

    `attention` on it gives the values of `attention` on kv with slightly different rounding: partial results are
    rounded to q's dtype before they are merged. With a window to the left, with rope on several queries of a sequence
    without `positions_q` of `[B, Tq]`, and with batch_invariant, the prefix is read for each sequence as if it were not
    shared. If the prefix is shared, a row of padding, whose length is 0, gets attention on the prefix instead of zeros.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> pools = np.random.default_rng(0).standard_normal((2, 4, 2, 16, 64), np.float32)
        >>> table = np.array([[3, 0], [3, 1]], np.int32)  # both begin with page 3
        >>> kv = qflash.PagedKV(*pools, table, lens=np.array([20, 17], np.int32))
        >>> q = np.ones((2, 1, 4, 64), np.float32)
        >>> out = qflash.attention(q, qflash.share_prefix(kv, 1), causal=True)
        >>> bool(np.allclose(out, qflash.attention(q, kv, causal=True), atol=1e-6))
        True
    """
    page_size = _page_size(kv)
    shape = tuple(getattr(kv.page_table, "shape", ()))
    if len(shape) != 2:
        raise ValueError(f"kv.page_table has shape {list(shape)}; allowed: rank 2, [batch, columns]")
    if tuple(getattr(kv.lens, "shape", ())) != shape[:1]:
        raise ValueError(
            f"kv.lens is {kv.lens!r}; allowed: an int32 array of {shape[0]}, one for each row of the table"
        )
    count = check_int("pages", pages, 0, shape[1])
    table: Any = kv.page_table
    lens: Any = kv.lens
    tokens = count * page_size
    if count == 0 or shape[0] == 0:
        return SharedPrefixKV(kv, None, kv, lens)
    if isinstance(table, np.ndarray) and isinstance(lens, np.ndarray):
        _check_shared(table, lens, count, tokens)
    prefix = replace(kv, page_table=table[:1, :count], lens=lens[:1] * 0 + tokens)
    rest = replace(kv, page_table=table[:, count:], lens=(lens - tokens) * (lens > 0))  # 0 in rows of padding, too
    return SharedPrefixKV(kv, prefix, rest, (lens - 1).clip(0))


def _page_size(kv: Any) -> int:
    """The page size of a PagedKV that has not been checked yet."""
    if type(kv) is not PagedKV:
        raise TypeError(f"kv is {type(kv).__module__}.{type(kv).__qualname__}; allowed: qflash.PagedKV")
    shape = tuple(getattr(kv.k_pages, "shape", ()))
    if len(shape) != 4:
        raise ValueError(f"kv.k_pages has shape {list(shape)}; allowed: rank 4, the pages of qflash.PagedKV")
    return kv.page_size


def _check_shared(table: Any, lens: Any, count: int, tokens: int) -> None:
    """Reject pages that are not a prefix of all sequences. Rows of padding are ignored."""
    short = np.flatnonzero((lens != 0) & (lens < tokens))
    if short.size:
        came = f"pages is {count}, {tokens} tokens, and kv.lens[{short[0]}] is {lens[short[0]]}"
        raise ValueError(f"{came}; allowed: pages that every sequence has whole")
    others = np.flatnonzero((lens != 0) & (table[:, :count] != table[:1, :count]).any(1))
    if others.size:
        came = f"pages is {count}, and row {others[0]} of kv.page_table begins with other pages than row 0"
        raise ValueError(f"{came}; allowed: leading columns that are the same in every row")


def attend_shared(
    q: Any, kv: SharedPrefixKV, v: Any, options: Options, kv_lens: Any, rope: Any, return_lse: Flag, sinks: Any
) -> tuple[Any, ...]:
    """The results of `attention`, in the order of its plan."""
    ropes = _ropes(q, kv, rope)
    if kv.prefix is None or ropes is None or not _can_share(q, options):
        return tuple(run(ATTENTION_PAGED, *paged_call(q, kv.whole, v, options, kv_lens, rope, return_lse, sinks)))
    # The rest first: it has all arguments of the call, and checks them.
    rest = run(ATTENTION_PAGED, *paged_call(q, kv.rest, v, options, kv_lens, ropes[1], True, sinks))
    batch, length, heads, head_dim = q.shape
    rows = q.reshape(1, batch * length, heads, head_dim)
    unmasked = options._replace(causal=False, window=None)
    out, lse = run(ATTENTION_PAGED, *paged_call(rows, kv.prefix, None, unmasked, None, ropes[0], True))
    by_head = lse.reshape(heads, batch, length).swapaxes(0, 1)
    return tuple(run(MERGE, (*rest, out.reshape(q.shape), by_head), (None,)))


def _can_share(q: Any, options: Options) -> bool:
    """Whether all queries see the whole prefix, and the order of summation may depend on the batch.

    If an argument has a wrong type, nothing is shared: the call without sharing rejects it.
    """
    window, invariant = options.window, options.batch_invariant
    pair = isinstance(window, (tuple, list)) and len(window) == 2 and isinstance(window[0], Integral)
    open_left = window is None or (pair and window[0] == -1)
    return len(getattr(q, "shape", ())) == 4 and open_left and isinstance(invariant, Integral) and not invariant


def _ropes(q: Any, kv: SharedPrefixKV, rope: Any) -> tuple[Rope | None, Rope | None] | None:
    """For the prefix and for the rest: positions are those in the whole sequence. None: they are not known here."""
    if rope is None:
        return None, None
    if type(rope) is not Rope or len(getattr(q, "shape", ())) != 4:
        return None  # rejected later
    batch, length = q.shape[:2]
    positions: Any = rope.positions_q
    if positions is None and length == 1:
        last: Any = kv.last
        positions = last.reshape(batch, 1)
    if tuple(getattr(positions, "shape", ())) != (batch, length):
        return None
    return replace(rope, positions_q=positions.reshape(batch * length)), replace(rope, positions_q=positions)
