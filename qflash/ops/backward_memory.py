"""The memory that a backward pass on a GPU may use for dS, and how dQ is computed within it.

dQ is dS K, and dS is computed along with dK and dV. If there is room for it (csrc/attn/backward/ds_tiles.h), it is
stored, for as many heads at a time as fit; otherwise S, P and dP are recomputed. Both ways give the same results within
the contract, and each gives the same bits in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

_TILE = 64  # queries, and keys
_TILE_BYTES = 2 * _TILE * _TILE
# When storing dS pays off was measured with sm90_bwd on an H200; the same is assumed for other kernels and GPUs.
_WORK_TILE = 256  # queries of dQ that a block computes together
_MULTIPROCESSORS = 132
DEFAULT_BACKWARD_MEMORY = 1 << 30

_limit = DEFAULT_BACKWARD_MEMORY


def set_backward_memory(nbytes: int) -> None:
    """Set how much memory gradients of attention on a GPU may use for the gradients of scores, dS.

    With enough of it, dQ takes one matrix product instead of three; with 0, memory is linear in the lengths. Applies to
    later calls of `attention`, in all threads, and to their gradients, whenever these are computed. A function traced
    by `jax.jit` keeps the limit that it was traced with. The default is 1 GiB.

    Args:
        nbytes: the limit in bytes.

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
    """The number of bytes that gradients of attention on a GPU may use for the gradients of scores, dS.

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
    except TypeError:  # an array of several elements, or of floats
        raise TypeError(f"{name} is {nbytes!r}, a {type(nbytes).__name__}; {allowed}") from None
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{name} is {number}; {allowed}")
    return number


@dataclass(frozen=True, slots=True)
class Scores:
    """The properties of a problem that determine the size of dS. window: keys left and right of the diagonal, -1 is
    unlimited."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    k_len: int
    window: tuple[int, int]
    packed: bool


@dataclass(frozen=True, slots=True)
class KeptDs:
    """dS in memory, for `pairs` pairs of a sequence and a KV head at a time, in `sections` passes."""

    pairs: int
    sections: int
    nbytes: int


def kept_ds(scores: Scores, limit: int) -> KeptDs | None:
    """How dS is stored within `limit` bytes; None if it cannot be. The equivalent of ds_tiles() in C."""
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
    pairs = -(-all_pairs // -(-all_pairs // fit))  # the same number in each section
    return KeptDs(pairs, -(-all_pairs // pairs), pairs * of_pair)


def ds_within(scores: Scores, limit: int) -> KeptDs | None:
    """How dS is stored within `limit` bytes; None if it is not, or if the heads that fit at a time would leave SMs
    idle: masks make work tiles unequal, and with few of them the longest is not balanced by others.
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
    """The most tiles of a pair of query tiles, one as far from the first as the other from the last."""

    def seen(query_tile: int) -> int:
        last = min((query_tile + 1) * _TILE, q_len) - 1
        return _tiles(max(0, min(k_len, last + k_len - q_len + right + 1)))

    last_tile = _tiles(q_len) - 1
    both = (seen(i) + (seen(last_tile - i) if i < last_tile - i else 0) for i in range(last_tile // 2 + 1))
    return max(1, *both)
