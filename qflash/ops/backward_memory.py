"""How much memory a backward pass on a GPU may take for dS, and what becomes of dQ within it.

dQ is dS K, and dS comes up while dK and dV are computed. Where there is room for it (csrc/attn/backward/ds_tiles.h), it
is kept, of as many heads at a time as fit; else S, P and dP are computed again. Both give the same results within the
contract, and each the same bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

_TILE = 64  # queries, and keys
_TILE_BYTES = 2 * _TILE * _TILE
# When keeping dS pays was measured with sm90_bwd on an H200; other kernels and GPUs take the same for granted.
_WORK_TILE = 256  # queries of dQ that a block computes at once
_MULTIPROCESSORS = 132
DEFAULT_BACKWARD_MEMORY = 1 << 30

_limit = DEFAULT_BACKWARD_MEMORY


def set_backward_memory(nbytes: int) -> None:
    """Let gradients of attention on a GPU take up to `nbytes` of memory for the gradients of scores.

    With more of it, dQ takes one product of matrices instead of three; with 0, memory is linear in the lengths. It
    holds for calls of `attention` from now on, in all threads, and for their gradients, whenever these are computed. A
    function that `jax.jit` has traced keeps the limit it was traced with. The default is 1 GiB.

    Example:
        >>> import qflash
        >>> qflash.set_backward_memory(2 << 30)
        >>> qflash.get_backward_memory()
        2147483648
        >>> qflash.set_backward_memory(1 << 30)
    """
    global _limit
    _limit = check_backward_memory("nbytes", nbytes)


def get_backward_memory() -> int:
    """The most bytes that gradients of attention on a GPU take for the gradients of scores.

    Example:
        >>> import qflash
        >>> qflash.get_backward_memory()
        1073741824
    """
    return _limit


def check_backward_memory(name: str, nbytes: object) -> int:
    """`nbytes` as an int, or an error that calls it `name`."""
    allowed = "allowed: an int, 0 to 2**63 - 1"
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise TypeError(f"{name} is {nbytes!r}, a {type(nbytes).__name__}; {allowed}")
    try:
        number = index(nbytes)
    except TypeError:  # an array of several, or of floats
        raise TypeError(f"{name} is {nbytes!r}, a {type(nbytes).__name__}; {allowed}") from None
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{name} is {number}; {allowed}")
    return number


@dataclass(frozen=True, slots=True)
class Scores:
    """What of a problem says how large dS is. window: keys left and right of the diagonal, -1 is open."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    k_len: int
    window: tuple[int, int]
    packed: bool


@dataclass(frozen=True, slots=True)
class KeptDs:
    """dS in memory: of `pairs` pairs of a sequence and a KV head at a time, in `sections` turns."""

    pairs: int
    sections: int
    nbytes: int


def kept_ds(scores: Scores, limit: int) -> KeptDs | None:
    """How dS is kept within `limit` bytes; None where it cannot be. What ds_tiles() says in C."""
    if scores.packed or 0 in (scores.batch, scores.q_heads, scores.kv_heads, scores.q_len, scores.k_len):
        return None
    strips, strip = _tiles(scores.q_len), _tiles(scores.k_len)
    left, right = scores.window
    if left >= 0 and right >= 0:
        strip = min(strip, _tiles(left + right + _TILE) + 1)
    elif right >= 0:
        strips, strip = (strips + 1) // 2, _folded_strip(scores.q_len, scores.k_len, right)
    of_pair = scores.q_heads // scores.kv_heads * strips * strip * _TILE_BYTES
    fit, all_pairs = limit // of_pair, scores.batch * scores.kv_heads
    if fit == 0:
        return None
    pairs = -(-all_pairs // -(-all_pairs // fit))  # as many in each section
    return KeptDs(pairs, -(-all_pairs // pairs), pairs * of_pair)


def ds_within(scores: Scores, limit: int) -> KeptDs | None:
    """How dS is kept within `limit` bytes; None where it is not, or where the heads that fit at a time would leave
    multiprocessors without work: masks make work tiles unequal, and few of them cannot make up for the longest.
    """
    kept = kept_ds(scores, limit)
    if kept is None or kept.sections == 1:
        return kept
    work_tiles = kept.pairs * (scores.q_heads // scores.kv_heads) * -(-scores.q_len // _WORK_TILE)
    if scores.window != (-1, -1):
        return kept if work_tiles >= 3 * _MULTIPROCESSORS else None
    waves = -(-work_tiles // _MULTIPROCESSORS)
    return kept if work_tiles >= 0.8 * waves * _MULTIPROCESSORS else None


def _tiles(tokens: int) -> int:
    return -(-tokens // _TILE)


def _folded_strip(q_len: int, k_len: int, right: int) -> int:
    """Tiles of two query tiles together, as far from the first as from the last."""

    def seen(query_tile: int) -> int:
        last = min((query_tile + 1) * _TILE, q_len) - 1
        return _tiles(max(0, min(k_len, last + k_len - q_len + right + 1)))

    last_tile = _tiles(q_len) - 1
    both = (seen(i) + (seen(last_tile - i) if i < last_tile - i else 0) for i in range(last_tile // 2 + 1))
    return max(1, *both)
