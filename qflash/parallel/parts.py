"""Parts: calls of attention on a rank's queries and some keys, with the arrays that belong to the slices.

Arrays that describe the whole sequence (lengths, offsets of packed sequences, positions for rope) are derived again for
each part. Ranks and chunk starts may be traced, so all of this is arithmetic on small arrays, and no value is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from qflash.api import attention, attention_varlen
from qflash.ops.attention import attention_gradients
from qflash.parallel.pieces import OPEN, ChunkCall, Piece, Span, chunk_call
from qflash.parallel.placement import Placement
from qflash.parallel.words import Words
from qflash.rotary import Rope


class Maths(Protocol):
    """The few framework functions that parts are computed with. All arrays but that of as_float32 are int32."""

    def arange(self, count: int, like: Any) -> Any: ...

    def concatenate(self, arrays: Sequence[Any]) -> Any: ...

    def clip(self, x: Any, low: Any, high: Any) -> Any: ...

    def where(self, condition: Any, x: Any, y: Any) -> Any: ...

    def as_float32(self, x: Any) -> Any: ...

    def starts(self, offsets: Any, tokens: Any) -> Any:
        """The first token of the packed sequence that each token is in."""


class Part(NamedTuple):
    """One call. q, k: slices of the local tokens, and of the available keys."""

    q: Span
    k: Span
    window: tuple[int, int]
    sinks: bool  # whether they count here: they count once per query
    alone: bool = True  # whether it has all keys that its queries see
    kv_lens: Any = None
    offsets: tuple[Any, Any] | None = None  # cu_seqlens of q and of k, if sequences are packed
    rope: Rope | None = None
    unseen: bool = False  # whether one packed sequence holds the keys that no query sees, however many


@dataclass(frozen=True, eq=False)
class Sequences:
    """The tokens of all ranks: where they are, and the arrays that describe them."""

    at: Placement
    words: Words
    maths: Maths
    like: Any  # an array on the device of the call
    kv_lens: Any = None  # [B], of whole sequences
    offsets: Any = None  # [B + 1], of all tokens
    longest: int = 0  # upper bound on the length of packed sequences
    rope: Rope | None = None  # its positions_q are those of this rank's tokens
    positions_q: Any = None  # [ranks, T] or [ranks, B, T]: given positions of all ranks, if they are needed
    positions_k: Any = None
    good_offsets: Any = False  # whether they are valid: True, an array, or False if each part is to check them
    wide: bool = False  # compute results that are merged from float32 arrays, so that they are not rounded before
    offsets_by_chunk: Any = None  # [chunks, B + 1]: of `cut_once`

    @property
    def token_dim(self) -> int:
        """The dimension of tokens in q, k and v."""
        return 1 if self.offsets is None else 0

    def tokens(self, rank: Any) -> Any:
        """The tokens that a rank has, as indices in the whole sequence: int32 `[T]`."""
        steps = self.maths.arange(self.at.chunk, self.like)
        return self.maths.concatenate([steps + chunk * self.at.chunk for chunk in self.at.chunks(rank)])

    def ring_part(self, piece: Piece, rank: Any, source: Any) -> Part:
        """The part of a piece, on the keys of `source`."""
        rope = None
        if self.rope is not None:
            positions_k = self._key_positions(source)[..., slice(*piece.k)]
            rope = replace(self.rope, positions_q=self._query_positions(rank, piece.q), positions_k=positions_k)
        lens, offsets = self._keys_in(source, piece.k), self._both(piece, rank, source)
        return Part(piece.q, piece.k, piece.window, piece.own, piece.alone, lens, offsets, rope)

    def gathered_parts(self, rank: int) -> list[Part]:
        """What a rank computes on all keys, in token order: one part per chunk, or one for both."""
        if self.words.open and self.offsets is None:
            q, length = (0, self.at.part), self.at.length
            rope = self._rope_of_gathered(rank, q, length)
            return [Part(q, (0, length), OPEN, sinks=True, kv_lens=self.kv_lens, rope=rope)]
        return [
            self._sliced_part(run, rank, chunk, chunk_call(self.at, chunk, self.words.edges))
            for run, chunk in enumerate(self.at.chunks(rank))
        ]

    def _sliced_part(self, run: int, rank: int, chunk: int, call: ChunkCall) -> Part:
        """The part of a rank's chunk number `run` on a prefix of all keys, in token order."""
        end = (chunk + 1) * self.at.chunk
        q = (run * self.at.chunk, (run + 1) * self.at.chunk)
        offsets = None
        if self.offsets is not None:
            offsets = self._offsets_in(chunk), self._offsets_until(call.k_end)
        lens, rope = self._lens_until(end), self._rope_of_gathered(rank, q, call.k_end)
        return Part(q, (0, call.k_end), call.window, sinks=True, kv_lens=lens, offsets=offsets, rope=rope)

    def masked_part(self, run: int, rank: Any, chunk: Any, k_end: Any, window: tuple[int, int]) -> Part:
        """The same for a traced chunk: lengths specify where its keys end, because slices cannot."""
        end = (chunk + 1) * self.at.chunk
        q = (run * self.at.chunk, (run + 1) * self.at.chunk)
        whole = (0, self.at.length)
        rope = self._rope_of_gathered(rank, q, self.at.length)
        if self.offsets is not None:
            # The last sequence is followed by one without queries, for the keys that no query of the chunk sees.
            tokens = self.maths.arange(1, self.like)
            ends = ((self._offsets_in(chunk), self.at.chunk), (self._offsets_until(k_end), self.at.length))
            offsets = tuple(self.maths.concatenate([x, tokens + last]) for x, last in ends)
            return Part(q, whole, window, sinks=True, offsets=offsets, rope=rope, unseen=True)
        lens = self._lens_until(end)
        if lens is None:
            lens = self.maths.arange(self.like.shape[0], self.like) * 0 + k_end
        return Part(q, whole, window, sinks=True, kv_lens=lens, rope=rope)

    def whole_part(self) -> Part:
        """All queries and all keys, in token order."""
        rope, whole = self.rope, (0, self.at.length)
        if rope is not None:  # attention's default positions are those of the whole sequence
            given = (None if x is None else self._of_all(x) for x in (self.positions_q, self.positions_k))
            rope = replace(rope, positions_q=next(given), positions_k=next(given))
        offsets = None if self.offsets is None else (self.offsets, self.offsets)
        return Part(whole, whole, self.words.edges, sinks=True, kv_lens=self.kv_lens, offsets=offsets, rope=rope)

    def _lens_until(self, end: Any) -> Any:
        """The number of keys that exist for the queries before `end`, so that their diagonal is unchanged."""
        if self.kv_lens is None or not self.words.ends_at_the_diagonal:
            return self.kv_lens
        # The last of these queries is as many tokens before the last key as there are queries after it.
        moved = self.maths.clip(self.kv_lens - (self.at.length - end), 0, self.at.length)
        return self._valid(self.kv_lens, moved)

    def _rope_of_gathered(self, rank: Any, q: Span, k_end: int) -> Rope | None:
        """Key j of all keys is at j, or at its given position: `positions_k` is then `[ranks, T]` in shard order."""
        if self.rope is None:
            return None
        if self.positions_k is not None:
            keys = self._of_all(self.positions_k)
        elif self.offsets is not None:
            keys = self._in_sequence(self.maths.arange(self.at.length, self.like))
        else:
            keys = self.maths.arange(self.at.length, self.like)
        return replace(self.rope, positions_q=self._query_positions(rank, q), positions_k=keys[..., :k_end])

    def _of_all(self, positions: Any) -> Any:
        """Positions of all ranks in token order."""
        chunk, holders = self.at.chunk, self.at.holders()
        return self.maths.concatenate([positions[rank][..., run * chunk : (run + 1) * chunk] for rank, run in holders])

    def _key_positions(self, source: Any) -> Any:
        if self.positions_k is not None:
            return self.positions_k[source]
        tokens = self.tokens(source)
        return tokens if self.offsets is None else self._in_sequence(tokens)

    def _query_positions(self, rank: Any, q: Span) -> Any:
        assert self.rope is not None
        given: Any = self.rope.positions_q
        if given is not None:
            return given[..., slice(*q)]
        tokens = self.tokens(rank)
        if self.offsets is not None:
            tokens = self._in_sequence(tokens)
        if self.kv_lens is not None:
            # The last query is at the last key. Without keys no query is rotated, whatever its position.
            lens = self.kv_lens[:, None]
            tokens = self.maths.where(lens > 0, tokens + lens - self.at.length, tokens)
        return tokens[..., slice(*q)]

    def _in_sequence(self, tokens: Any) -> Any:
        return tokens - self.maths.starts(self.offsets, tokens)

    def keys_of(self, rank: Any) -> Any:
        """[B]: the number of keys of a rank that exist, for sequences with valid lengths; None: all of them."""
        return None if self.kv_lens is None else self._existing(rank, (0, self.at.part))

    def _keys_in(self, source: Any, k: Span) -> Any:
        """[B]: the number of these keys of `source` that exist."""
        return None if self.kv_lens is None else self._valid(self.kv_lens, self._existing(source, k))

    def _existing(self, source: Any, k: Span) -> Any:
        """The same for any lengths. Keys that exist come first: a rank has its chunks in order."""
        found = 0
        for run, chunk in enumerate(self.at.chunks(source)):
            if k[0] <= run * self.at.chunk < k[1]:
                found = found + self.maths.clip(self.kv_lens - chunk * self.at.chunk, 0, self.at.chunk)
        return found

    def _valid(self, lens: Any, lens_here: Any) -> Any:
        """Lengths of a part. An invalid length stays invalid, so that no bad value becomes a good one."""
        return self.maths.where((lens >= 0) & (lens <= self.at.length), lens_here, lens * 0 - 1)

    def _both(self, piece: Piece, rank: Any, source: Any) -> tuple[Any, Any] | None:
        """Offsets within the chunk of queries and the chunk of keys of a piece."""
        if self.offsets is None:
            return None
        q_run, k_run = (span[0] // self.at.chunk for span in (piece.q, piece.k))
        return self._offsets_in(self.at.chunks(rank)[q_run]), self._offsets_in(self.at.chunks(source)[k_run])

    def cut_once(self) -> Sequences:
        """The same, with the offsets within all chunks: on a GPU each part would launch kernels for its own."""
        starts = self.maths.arange(self.at.runs * self.at.ranks, self.like)[:, None] * self.at.chunk
        checked = replace(self, good_offsets=self._are_good())
        found = self.maths.clip(self.offsets - starts, 0, self.at.chunk)
        return replace(checked, offsets_by_chunk=checked._valid_offsets(found))

    def _offsets_in(self, chunk: Any) -> Any:
        """Where sequences begin within a chunk; sequences that are elsewhere are empty."""
        if self.offsets_by_chunk is not None:
            return self.offsets_by_chunk[chunk]
        start = chunk * self.at.chunk
        return self._valid_offsets(self.maths.clip(self.offsets, start, start + self.at.chunk) - start)

    def _offsets_until(self, end: Any) -> Any:
        """Where sequences begin within the first `end` tokens; later sequences are empty."""
        return self._valid_offsets(self.maths.clip(self.offsets, 0, end))

    def _valid_offsets(self, found: Any) -> Any:
        """If any offset of the call is invalid, all of these are -1: clipped, they could be valid, or invalid on some
        ranks only, so that others wait."""
        good = self._are_good()
        return found if good is True else self.maths.where(good, found, -1)

    def _are_good(self) -> Any:
        if self.good_offsets is not False:
            return self.good_offsets
        of = self.offsets
        return (of[0] == 0) & (of[-1] == self.at.length) & (of[1:] >= of[:-1]).all()

    # Calls ------------------------------------------------------------------------------------------------------------

    def attend(self, part: Part, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
        """out and lse of a part. q: all of the rank's; k, v: all that are available."""
        words = self._words_of(part, sinks)
        arrays = (self._cut(q, part.q), self._cut(k, part.k), self._cut(v, part.k))
        if self.wide and not part.alone:
            arrays = tuple(map(self.maths.as_float32, arrays))
        if part.offsets is None:
            out, lse = attention(*arrays, return_lse=True, **words)
        else:
            out, lse = attention_varlen(*arrays, *part.offsets, *self._longest(part), return_lse=True, **words)
        return out, lse

    def gradients(
        self, part: Part, dout: Any, dlse: Any, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any
    ) -> tuple[Any, ...]:
        """dq, dk, dv and, if sinks count in this part, dsinks. out, lse: of all of the rank's rows and all keys."""
        words = self._words_of(part, sinks)
        of_lse = [None if x is None else x[..., slice(*part.q)] for x in (dlse, lse)]
        return attention_gradients(
            self._cut(dout, part.q),
            of_lse[0],
            self._cut(q, part.q),
            self._cut(k, part.k),
            self._cut(v, part.k),
            self._cut(out, part.q),
            of_lse[1],
            partial=not part.alone,
            offsets=part.offsets,
            longest=self._longest(part),
            **words,
        )

    def _words_of(self, part: Part, sinks: Any) -> dict[str, Any]:
        return {
            "window": part.window,
            "softcap": self.words.softcap,
            "scale": self.words.scale,
            "precision": self.words.precision,
            "kv_lens": part.kv_lens,
            "rope": part.rope,
            "sinks": sinks if part.sinks else None,
        }

    def _longest(self, part: Part) -> tuple[int, int]:
        """Upper bounds on the lengths of packed sequences."""
        keys = part.k[1] - part.k[0]
        return min(self.longest, part.q[1] - part.q[0]), keys if part.unseen else min(self.longest, keys)

    def _cut(self, x: Any, span: Span) -> Any:
        """A slice of tokens of an array shaped like q, k or v: a view, if the framework has views."""
        if span == (0, x.shape[self.token_dim]):
            return x
        return x[:, slice(*span)] if self.token_dim else x[slice(*span)]
