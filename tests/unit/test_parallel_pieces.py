"""Placement and pieces: every pair of a query and a key that a mask allows is in one call, and no other pair is."""

from __future__ import annotations

import numpy as np
import pytest

from qflash.parallel.pieces import chunk_call, ring_hops, ring_pieces, ring_steps
from qflash.parallel.placement import Placement, check_placement
from qflash.parallel.words import check_strategy, check_words

EDGES = [(-1, -1), (-1, 0), (0, 0), (1, 0), (5, 0), (7, 0), (100, 0), (3, 2), (-1, 4), (4, -1), (9, 9), (0, 5), (30, 1)]


def band(queries: int, keys: int, window: tuple[int, int]) -> np.ndarray:
    """What attention lets its queries see: the diagonal ends at the last query and the last key."""
    behind = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
    left, right = window
    return (behind <= (left if left >= 0 else keys + queries)) & (-behind <= (right if right >= 0 else keys + queries))


def global_mask(length: int, edges: tuple[int, int]) -> np.ndarray:
    return band(length, length, edges)


def tokens(at: Placement, rank: int) -> np.ndarray:
    return np.concatenate([np.arange(chunk * at.chunk, (chunk + 1) * at.chunk) for chunk in at.chunks(rank)])


@pytest.mark.parametrize("edges", EDGES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_pieces_of_a_ring_are_the_mask(ranks, kind, packed, edges):
    at = Placement(kind, ranks, 6 * 2 * ranks)
    seen = np.zeros((at.length, at.length), int)
    own = np.zeros(at.length, int)
    hops = ring_hops(at, edges, packed)
    for rank in range(ranks):
        for source in range(ranks):
            pieces = ring_pieces(at, rank, source, edges, packed)
            assert not pieces or (rank - source) % ranks <= hops
            for piece in pieces:
                q, k = tokens(at, rank)[slice(*piece.q)], tokens(at, source)[slice(*piece.k)]
                assert len(q) and len(k)
                seen[np.ix_(q, k)] += band(len(q), len(k), piece.window)
                own[q] += piece.own
    np.testing.assert_array_equal(seen, global_mask(at.length, edges))
    assert (own == 1).all()  # so that a sink counts once


@pytest.mark.parametrize("edges", EDGES, ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_a_piece_is_alone_where_its_queries_see_no_other_keys(kind, edges):
    at, mask = Placement(kind, 4, 48), global_mask(48, edges)
    for rank in range(4):
        steps = ring_steps(at, rank, edges)
        assert len(steps) == ring_hops(at, edges) + 1
        for hop, pieces in enumerate(steps):
            for piece in pieces:
                q, k = tokens(at, rank)[slice(*piece.q)], tokens(at, (rank - hop) % 4)[slice(*piece.k)]
                elsewhere = np.delete(mask[q], k, axis=1)
                assert piece.alone is not bool(elsewhere.any())


@pytest.mark.parametrize("edges", EDGES, ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_the_calls_on_gathered_keys_are_the_mask(kind, edges):
    at = Placement(kind, 3, 36)
    seen = np.zeros((at.length, at.length), int)
    for rank in range(at.ranks):
        for chunk in at.chunks(rank):
            call = chunk_call(at, chunk, edges)
            rows = slice(chunk * at.chunk, (chunk + 1) * at.chunk)
            seen[rows, : call.k_end] += band(at.chunk, call.k_end, call.window)
    np.testing.assert_array_equal(seen, global_mask(at.length, edges))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_gives_every_rank_the_same_work(ranks):
    at = Placement("zigzag", ranks, 2 * ranks * 8)
    work = [
        sum(
            int(band(piece.q[1] - piece.q[0], piece.k[1] - piece.k[0], piece.window).sum())
            for source in range(ranks)
            for piece in ring_pieces(at, rank, source, (-1, 0))
        )
        for rank in range(ranks)
    ]
    assert len(set(work)) == 1
    of_steps = [len(ring_pieces(at, rank, source, (-1, 0))) for rank in range(ranks) for source in range(ranks)]
    assert set(of_steps) == {1}  # one call in every step: nobody waits for anybody


@pytest.mark.parametrize(
    ("edges", "hops"), [((0, 0), 0), ((1, 0), 1), ((8, 0), 1), ((9, 0), 2), ((-1, 0), 3), ((-1, -1), 3), ((0, 1), 3)]
)
def test_keys_move_on_no_further_than_the_window_reaches(edges, hops):
    """Contiguous chunks of 8 tokens: a key 8 tokens back is one rank away, or two for the first query of a chunk."""
    assert ring_hops(Placement("contiguous", 4, 32), edges) == hops


@pytest.mark.parametrize("edges", [(-1, 0), (3, 2)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_no_tokens(packed, edges):
    """Masks leave nothing to compute, or a call on nothing; there is one step at least."""
    steps = ring_steps(Placement("zigzag", 4, 0), 1, edges, packed)
    assert steps and all(piece.q == piece.k == (0, 0) for pieces in steps for piece in pieces)


def test_chunks_and_who_holds_them():
    at = Placement("zigzag", 4, 64)
    assert [at.chunks(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert at.holders() == ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1), (0, 1))
    assert (at.chunk, at.part, at.runs) == (8, 16, 2)
    assert Placement("contiguous", 4, 64).holders() == ((0, 0), (1, 0), (2, 0), (3, 0))


def test_lengths_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"x has 12 tokens in dimension 1; allowed: a multiple of 8, two chunks for"):
        Placement.of_whole("zigzag", 4, 12, "x", 1)
    with pytest.raises(ValueError, match=r"x has 13 tokens in dimension 0; allowed: a multiple of 4, one chunk"):
        Placement.of_whole("contiguous", 4, 13, "x", 0)
    with pytest.raises(ValueError, match=r"q has 3 tokens on this rank; allowed: an even number"):
        Placement.of_part("zigzag", 4, 3, "q")
    assert Placement.of_part("contiguous", 4, 3, "q").length == 12


def test_placement_follows_the_mask():
    assert check_placement(None, True) == "zigzag" and check_placement(None, False) == "contiguous"
    with pytest.raises(ValueError, match=r"placement is 'striped'; allowed: 'zigzag', 'contiguous'"):
        check_placement("striped", True)
    with pytest.raises(TypeError, match="causal is 'yes'"):
        check_placement(None, "yes")


def words(strategy, **given):
    of = {"causal": False, "window": None, "softcap": None, "scale": None, "precision": None, "return_lse": False}
    return check_words(strategy, None, *(of | given).values(), 64)


@pytest.mark.parametrize(
    ("strategy", "given", "kv_lens", "packed", "text"),
    [
        ("ring", {"causal": True}, True, False, "kv_lens is given and causal is True.*'all_gather' or 'ulysses' takes"),
        ("ring", {"window": (3, 3)}, True, False, r"window is \(3, 3\).*strategy='ulysses' takes it"),
        ("ring", {"causal": True, "window": (3, 0)}, False, True, "cu_seqlens is given and window.*'all_gather' or"),
        ("ring", {}, True, True, "kv_lens and cu_seqlens are given.*strategy='ulysses' takes both"),
        ("all_gather", {"window": (3, 3)}, True, False, "kv_lens is given.*strategy='ulysses' takes it"),
        ("all_gather", {"window": (3, -1)}, False, True, "cu_seqlens is given.*strategy='ulysses' takes it"),
    ],
)
def test_what_a_strategy_cannot_express_is_refused(strategy, given, kv_lens, packed, text):
    with pytest.raises(ValueError, match=text):
        check_strategy(words(strategy, **given), 4, 8, 2, kv_lens, packed)


@pytest.mark.parametrize(
    ("strategy", "given", "kv_lens", "packed"),
    [
        ("ring", {}, True, False),
        ("ring", {"causal": True}, False, True),
        ("ring", {"window": (3, 3)}, False, False),
        ("ring", {"precision": "int8", "window": (3, 3)}, False, False),
        ("ring", {"precision": "int8_fp8", "causal": True}, False, True),
        ("all_gather", {"causal": True, "window": (9, -1)}, True, False),
        ("all_gather", {"causal": True}, False, True),
        ("ulysses", {"window": (3, 3)}, True, True),
    ],
)
def test_what_a_strategy_can_express_is_not(strategy, given, kv_lens, packed):
    check_strategy(words(strategy, **given), 4, 8, 2, kv_lens, packed)


def test_heads_that_ulysses_cannot_spread_are_refused():
    for q_heads, kv_heads in ((8, 8), (8, 4), (8, 2), (8, 1), (16, 8)):
        check_strategy(words("ulysses"), 4, q_heads, kv_heads, False, False)
    with pytest.raises(ValueError, match=r"q has 6 heads; allowed with strategy='ulysses' on 4 ranks: a multiple of 4"):
        check_strategy(words("ulysses"), 4, 6, 2, False, False)
    with pytest.raises(ValueError, match=r"k has 6 heads; .*; strategy='ring' or 'all_gather' takes any number"):
        check_strategy(words("ulysses"), 4, 12, 6, False, False)
