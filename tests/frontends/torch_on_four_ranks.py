"""Tests of qflash.parallel.torch. test_torch_parallel.py runs them in a process that starts four ranks, once, and then
eight."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import qflash
from qflash.rotary import Rope
from qflash.testing import torch_ranks
from qflash.testing.case import Case, Rotary
from qflash.testing.compare import check_contract, check_gradients, errors
from qflash.testing.processes import Processes
from qflash.testing.simulated_ranks import simulate
from qflash.testing.sink_gradients import check_sink_gradient

STRATEGIES = ["ring", "all_gather", "ulysses"]
BASE = {"q_len": 64, "k_len": 64, "q_heads": 8, "kv_heads": 2, "head_dim": 32, "batch": 2}
PACKED = {"q_heads": 4, "kv_heads": 4, "head_dim": 32, "q_lens": (3, 37, 0, 16, 8), "k_lens": (3, 37, 0, 16, 8)}
SINKS = ("0.5", "-2", "1", "0")
EVERYWHERE = [
    Case("full", **BASE),
    Case("causal", **BASE, causal=True),
    Case("causal_float16", **BASE, causal=True, dtype="float16"),
    Case("causal_bfloat16", **BASE, causal=True, dtype="bfloat16"),
    Case("full_bfloat16", **BASE, dtype="bfloat16"),
    Case("many_heads", **(BASE | {"kv_heads": 8, "batch": 1}), causal=True),
    Case("one_key_head", **(BASE | {"kv_heads": 1}), causal=True),
    Case("window", **BASE, causal=True, window=(20, 0)),
    Case("window_both_ways", **BASE, window=(13, 7), dtype="bfloat16"),
    Case("softcap_sinks", **BASE, causal=True, softcap=5.0, scale=0.3, sinks=SINKS),
    Case("rope", **BASE, causal=True, rope=Rotary(32)),
    Case("rope_positions", **BASE, causal=True, rope=Rotary(16, True, "per_batch")),
    Case("lens", **BASE, kv_lens=(64, 23)),
    Case("lens_sinks", **BASE, kv_lens=(9, 0), sinks=SINKS),
    Case("packed", **PACKED),
    Case("packed_causal", **PACKED, causal=True, rope=Rotary(32)),
]
GATHERED = [
    Case("lens_causal", **BASE, causal=True, kv_lens=(64, 23)),
    Case("packed_window", **PACKED, causal=True, window=(9, 0)),
]
ULYSSES = [
    Case("lens_window", **BASE, window=(9, 4), kv_lens=(64, 23)),
    Case("packed_window_both_ways", **PACKED, window=(9, 4)),
]
CHOSEN = [
    *((case, strategy) for case in EVERYWHERE for strategy in STRATEGIES),
    *((case, strategy) for case in GATHERED for strategy in STRATEGIES[1:]),
    *((case, "ulysses") for case in ULYSSES),
]
SOME = ("causal", "window_both_ways", "rope_positions", "lens", "packed_causal")  # masks, positions and kinds of arrays
by_name = pytest.mark.parametrize(("case", "strategy"), CHOSEN, ids=lambda x: getattr(x, "name", x))


def slow_unless(chosen: bool) -> list:
    return [] if chosen else [pytest.mark.slow]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    group = Processes(4, tmp_path_factory.mktemp("ranks") / "store")
    yield group
    group.close()


@pytest.fixture(scope="session")
def eight(tmp_path_factory):
    group = Processes(8, tmp_path_factory.mktemp("eight") / "store")
    yield group
    group.close()


def check(case: Case, got: dict) -> None:
    check_contract(case, got["out"], got["lse"])
    check_gradients(case, got["dq"], got["dk"], got["dv"])
    if case.sinks:
        check_sink_gradient(case, got["dsinks"])
    assert got["same"]


@pytest.mark.parametrize(
    ("case", "strategy", "placement"),
    [
        pytest.param(case, strategy, placement, marks=slow_unless(usual == case.causal or case.name in SOME))
        for case, strategy in CHOSEN
        for placement, usual in (("zigzag", True), ("contiguous", False))
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_four_ranks(ranks, case, strategy, placement):
    """Each case with the placement that is its default; some with the other one, too."""
    check(case, ranks.values(torch_ranks.attend, case, strategy, placement)[0])


@pytest.mark.parametrize(
    ("case", "strategy"),
    [pytest.param(case, strategy, marks=slow_unless(case.name in SOME)) for case, strategy in CHOSEN],
    ids=lambda x: getattr(x, "name", x),
)
def test_two_ranks_of_a_mesh(ranks, case, strategy):
    """Both groups of ranks of one dimension; the placement is the default."""
    check(case, ranks.values(torch_ranks.attend, case, strategy, None, "mesh")[0])


ON_EIGHT = [
    Case("eight_causal", **BASE, causal=True),
    Case("eight_many_heads", **(BASE | {"kv_heads": 8, "dtype": "bfloat16"}), causal=True, rope=Rotary(16, True)),
    Case("eight_window", **BASE, window=(13, 7), softcap=5.0),
    Case("eight_lens", **BASE, kv_lens=(61, 3), sinks=SINKS),
    Case("eight_packed", **(PACKED | {"q_heads": 8}), causal=True, rope=Rotary(32)),
]


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(case, strategy, marks=slow_unless(at % 3 != left_out))
        for at, case in enumerate(ON_EIGHT)
        for left_out, strategy in enumerate(STRATEGIES)
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_eight_ranks(eight, case, strategy):
    """Two strategies each, in turn."""
    check(case, eight.values(torch_ranks.attend, case, strategy, None)[0])


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
@by_name
def test_eight_ranks_everywhere(eight, case, strategy, placement):
    case = replace(case, q_heads=8)
    check(case, eight.values(torch_ranks.attend, case, strategy, placement)[0])


QUANTIZED = [
    Case("int8", **BASE),
    Case("int8_causal", **BASE, causal=True),
    Case("int8_bfloat16", **BASE, causal=True, dtype="bfloat16"),
    Case("int8_biased", **BASE, causal=True, data="biased_k"),
    Case("int8_rope", **BASE, causal=True, rope=Rotary(32)),
    Case("int8_lens", **BASE, kv_lens=(64, 23), sinks=SINKS),
    Case("int8_window", **BASE, causal=True, window=(20, 0), rope=Rotary(16, True, "per_batch")),
    Case("int8_window_both_ways", **BASE, window=(13, 7), dtype="bfloat16"),
    Case("int8_packed", **PACKED, causal=True, rope=Rotary(32)),
    Case("int8_packed_float16", **(PACKED | {"dtype": "float16"}), sinks=SINKS),
]


@pytest.mark.parametrize(
    ("case", "strategy"),
    [(case, strategy) for case in QUANTIZED for strategy in (STRATEGIES if case in QUANTIZED[:6] else ["ring"])],
    ids=lambda x: getattr(x, "name", x),
)
def test_quantized(ranks, case, strategy):
    got = ranks.values(torch_ranks.attend, case, strategy, "zigzag", "world", "int8")[0]
    check_contract(case, got["out"], got["lse"], precision="int8")
    assert got["same"]


def test_keys_are_quantized_once(ranks):
    """After three hops they are the integers that their own rank made."""
    case = Case("once", **BASE)
    got = ranks.values(torch_ranks.attend, case, "ring", "contiguous", "world", "int8")[0]
    want = simulate(case, "ring", "contiguous", 4, precision="int8")
    assert errors(got["out"], want.out).relative_l2 < 2e-6


def test_what_only_hopper_has_is_refused_in_the_words_of_attention(ranks):
    x = torch.zeros(SHAPES[0])
    with pytest.raises(qflash.NoKernelError) as alone:
        qflash.attention(x, x, x, precision="int8_fp8")
    for answer in ranks.call(torch_ranks.call, SHAPES, {"precision": "int8_fp8"}, {}):
        assert (answer.error, answer.text) == ("NoKernelError", str(alone.value))


def test_a_round_is_under_way_before_the_calls_that_hide_it(ranks):
    """The last round is two hops, and one call where the same queries see the keys of both."""
    for rank, (events, _) in enumerate(ranks.values(torch_ranks.what_happens, {"causal": True})):
        assert events == ["hop", "call", "hop", "call", "call"] + (["call"] if rank == 2 else [])
    for events, _ in ranks.values(torch_ranks.what_happens, {"causal": True, "precision": "int8"}):
        assert events == ["hop", "call", "hop", "call", "call", "call"]  # each rank's keys are quantized alone


def test_a_window_sends_keys_no_further_than_it_reaches(ranks):
    words = {"causal": True, "window": (40, 0), "placement": "contiguous"}
    for rank, (events, _) in enumerate(ranks.values(torch_ranks.what_happens, words)):
        assert events == ["hop", "call", "call"] if rank else ["hop", "call"]  # nothing is before the first rank


def test_quantized_keys_and_values_are_sent_in_half_the_bytes(ranks):
    """One for each number, four for each token of a head and, once, four for each channel of a head."""
    plain, quantized = (
        ranks.values(torch_ranks.what_happens, {"precision": precision})[0][1] for precision in (None, "int8")
    )
    hops, tokens, heads, head_dim = 3, 64, 2, 64
    assert plain == hops * 2 * tokens * heads * head_dim * 2
    assert quantized == hops * 2 * (tokens * heads * (head_dim + 4) + heads * head_dim * 4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shard_and_unshard(ranks, dim, causal):
    answers = ranks.values(torch_ranks.there_and_back, 16, dim, causal)
    assert all(same for same, _ in answers)
    places = [positions for _, positions in answers]
    assert sorted(token for own in places for token in own) == list(range(16))
    assert places[1] == ([2, 3, 12, 13] if causal else [4, 5, 6, 7])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_of_different_results(ranks, strategy):
    """What moves backward is the same on all ranks, whichever of out and lse a rank's loss is made of."""
    assert max(ranks.values(torch_ranks.differ_in_losses, strategy)) < 2e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transforms_of_torch_func(ranks, strategy):
    assert max(ranks.values(torch_ranks.transformed, strategy)) < 2e-6


@pytest.mark.parametrize("of", ["q", "k", "v"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_second_derivatives_are_refused(ranks, strategy, of):
    """Also where they would be one of several terms, which PyTorch would leave out without a word."""
    for answer in ranks.call(torch_ranks.second_derivative, strategy, "qkv".index(of)):
        assert answer.error == "NotImplementedError" and "attention has no second derivative" in answer.text, answer


@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window": (3, 2)}, {"cu_seqlens": [0, 0]}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sequences_of_nothing(ranks, strategy, words):
    packed = "cu_seqlens" in words
    part, lse = ([0, 4, 16], [4, 0]) if packed else ([1, 0, 4, 16], [1, 4, 0])
    assert ranks.values(torch_ranks.of_nothing, strategy, words) == [[part, lse, part, part, part]] * 4


# torch.compile --------------------------------------------------------------------------------------------------------


HOP = "all_to_all_single"  # in which one rank gets all
GRAPHS = {
    "ring": [
        f"{HOP} attention wait_tensor attention merge",
        # Keys go round a second time, with their gradients one hop behind them and one hop more.
        "after " + 2 * f"{HOP} attention_backward_share wait_tensor " + f"{HOP} wait_tensor",
    ],
    "all_gather": [
        "GATHER wait_tensor attention attention",
        "after GATHER wait_tensor attention_backward attention_backward SCATTER wait_tensor",
    ],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_whole(ranks, strategy):
    """In the order of the graphs a hop is under way before the call that hides it, as it is without a compiler. The
    second round of keys stays in the backward pass, so that nobody keeps what came in the first."""
    for distances, graphs in ranks.values(torch_ranks.compiled, strategy)[:2]:
        assert max(distances) < 2e-6
        spoken = [
            re.sub("all_gather_[a-z_]+", "GATHER", re.sub("reduce_scatter_[a-z_]+", "SCATTER", x)) for x in graphs
        ]
        assert spoken == GRAPHS.get(strategy, spoken)


def test_a_ring_of_integers_compiled_whole(ranks):
    """Integers, scales and means are three exchanges each hop."""
    hop, arrived = " ".join([HOP] * 3), " ".join(["wait_tensor"] * 3)
    for distances, graphs in ranks.values(torch_ranks.compiled, "ring", "int8")[:2]:
        assert max(distances) < 2e-6
        assert graphs == [f"quantize {hop} attention {arrived} dequantize attention merge"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_tensor_three_times_compiled_whole(ranks, strategy):
    assert max(ranks.values(torch_ranks.compiled_on_one_tensor, strategy)) < 2e-6


def test_an_exchange_without_gradients_compiled_whole(ranks):
    """out and lse go together, in a function that a compiler then traces as any other."""
    for distances, _ in ranks.values(torch_ranks.compiled, "ulysses", "int8")[:2]:
        assert max(distances) < 2e-6


def test_a_compiled_ring_of_integers_refuses_gradients(ranks):
    text = "precision 'int8' has no backward pass; allowed: precision=None"
    assert all(text in said for said in ranks.values(torch_ranks.compiled_gradient_of_integers))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_calls_refuse_what_their_parts_would_take(ranks, strategy):
    """Parts have slices of positions, and in a ring arrays made float32."""
    for said in ranks.values(torch_ranks.compiled_bad_input, strategy):
        for text, of in zip(said, ("rope.positions_q", "rope.positions_k", "q", "k"), strict=True):
            assert f"{of} has shape [32]; allowed: [8]" in text or f"{of} has dtype" in text, text


# Bad input: an error on every rank, which names the rank and what it had ----------------------------------------------

SHAPES = [[1, 8, 4, 16]] * 3
NESTED = torch.nested.nested_tensor([torch.zeros(8, 4, 16)], layout=torch.jagged)


def refused(ranks, words: dict, of_rank: dict, error: str, text: str, own: str | None = None, shapes=SHAPES) -> None:
    """Every rank raises: `text`; on the ranks of `of_rank`, `own` where that is something else."""
    for rank, answer in enumerate(ranks.call(torch_ranks.call, shapes, words, of_rank)):
        expected = own if own is not None and rank in of_rank else text
        assert re.search(expected, answer.text), (rank, answer)
        assert answer.error == error or rank not in of_rank, (rank, answer)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_with_another_length(ranks, strategy):
    odd = {2: {name: [1, 12, 4, 16] for name in "qkv"}}
    text = (
        r"ranks have different calls: ranks 0, 1, 3 had q float32 \[1, 8, 4, 16\] on cpu.*"
        r"rank 2 had q float32 \[1, 12, 4, 16\] on cpu.*; allowed: the same on all ranks"
    )
    refused(ranks, {"strategy": strategy}, odd, "ValueError", text)
    ranks.values(torch_ranks.call, SHAPES, {"strategy": strategy}, {})  # and the group is as good as before


@pytest.mark.parametrize(
    ("of_one", "text"),
    [
        ({"dtype": torch.bfloat16}, r"rank 1 had q bfloat16 \[1, 8, 4, 16\] on cpu, k bfloat16"),
        ({"strategy": "all_gather"}, "rank 1 had strategy='all_gather'"),
        ({"causal": True}, r"rank 1 had strategy='ring', placement='zigzag', window=\(-1, 0\)"),
        ({"kv_lens": [7]}, r"rank 1 had kv_lens int32 \[1\] of 7"),
        ({"softcap": 3.0}, "rank 1 had softcap=3.0"),
        ({"return_lse": True}, "rank 1 had return_lse=True"),
        ({"grad": True}, "rank 1 had with gradients"),
    ],
)
def test_a_rank_with_another_call(ranks, of_one, text):
    refused(ranks, {}, {1: of_one}, "ValueError", text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"interleaved": True}, r"rank 1 had rope float32 \[32, 8\], interleaved=True"),
        ({"cos": torch.ones(32, 8, dtype=torch.bfloat16)}, r"rank 1 had rope bfloat16 \[32, 8\], interleaved=False"),
    ],
)
def test_a_rank_with_another_rope(ranks, change, text):
    rope = Rope(*(torch.from_numpy(x) for x in qflash.rope_tables(32, 16)))
    other = replace(rope, sin=rope.sin.to(change.get("cos", rope.cos).dtype), **change)
    refused(ranks, {"rope": rope}, {1: {"rope": other}}, "ValueError", text)


def test_calls_on_a_gpu_are_asked_about_once(ranks):
    """Two kinds are kept here: with a third, all ranks begin anew."""
    assert ranks.values(torch_ranks.ask, "abacaa", 2) == [[1, 2, 2, 3, 4, 4]] * 4


@pytest.mark.parametrize(
    ("of_one", "error", "own"),
    [
        ({"k": [1, 8, 3, 16], "v": [1, 8, 3, 16]}, "ValueError", "k has 3 heads; allowed: a divisor of q's 4 heads"),
        ({"q": [1, 7, 4, 16]}, "ValueError", "q has 7 tokens on this rank; allowed: an even number"),
        ({"k": [1, 6, 4, 16], "v": [1, 6, 4, 16]}, "ValueError", "k has 6 tokens on this rank; allowed: q's, 8"),
        ({"strategy": "star"}, "ValueError", "strategy is 'star'; allowed: 'ring', 'all_gather', 'ulysses'"),
        ({"placement": "striped"}, "ValueError", "placement is 'striped'"),
        ({"kv_lens": [8]}, "ValueError", "kv_lens is given and causal is True"),
        ({"dtype": torch.float64}, "TypeError", "q has dtype torch.float64|q has dtype float64"),
        ({"window": (1, 2, 3)}, "ValueError", "window is"),
        ({"precision": "int4"}, "ValueError", "precision is 'int4'"),
        ({"max_seqlen": 3}, "ValueError", "max_seqlen is 3 and cu_seqlens is None"),
        ({"q": NESTED}, "TypeError", "q is a nested tensor; allowed: a dense"),
        ({"precision": "int8", "grad": True}, "NotImplementedError", "requires a gradient"),
    ],
)
def test_a_rank_with_a_bad_call(ranks, of_one, error, own):
    refused(ranks, {"causal": True}, {3: of_one}, error, "rank 3 of 4 refused the call: ", own)


def test_a_rank_that_fails_before_anything_moves(ranks):
    *others, last = ranks.call(torch_ranks.run_out_of_memory)
    assert last.error == "OutOfMemoryError"
    text = "rank 3 of 4 refused the call: OutOfMemoryError: nothing is left"
    assert [answer.text for answer in others] == [text] * 3


def test_values_are_looked_at_before_anything_moves(ranks):
    packed = [[8, 4, 16]] * 3
    everywhere = {rank: {} for rank in range(4)}
    rope = qflash.Rope(*(torch.from_numpy(x) for x in qflash.rope_tables(16, 16)))
    for words, text in (
        ({"kv_lens": [33]}, r"kv_lens\[0\] is 33; allowed: 0 to 32, the tokens of all ranks"),
        ({"rope": rope}, "rope.cos has 16 rows; allowed: at least 32, one for each position in use"),
    ):
        refused(ranks, words, everywhere, "ValueError", text)
    for offsets, text in (
        ([0, 31], "cu_seqlens begins with 0 and ends with 31; allowed: from 0 to 32, the tokens of all ranks"),
        ([0, 20, 10, 32], r"cu_seqlens\[2\] is 10 after 20"),
        ([[0, 32]], r"cu_seqlens has shape \(1, 2\); allowed: \[sequences \+ 1\]"),
    ):
        refused(ranks, {"cu_seqlens": offsets}, everywhere, "ValueError", text, shapes=packed)


def on_every_rank(answers, text: str, of_last: str) -> None:
    """All raise: the last rank, which is at fault, in words of its own."""
    for answer in answers[:3]:
        assert answer.error == "ValueError" and text in answer.text, answer
    assert of_last in answers[3].text, answers[3]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["positions_q", "positions_k"])
def test_a_position_that_one_rank_cannot_have(ranks, name, strategy):
    for bad in (64, -(2**31)):
        own = f"rope.{name}[7] is {bad} on this rank; allowed: -63 to 63, the rows of rope.cos"
        answers = ranks.call(torch_ranks.call_with_positions, strategy, name, bad, {})
        on_every_rank(answers, f"rank 3 of 4 refused the call: ValueError: {own}", own)


def test_a_position_of_a_key_that_does_not_exist_is_not_looked_at(ranks):
    words = {"kv_lens": [31], "placement": "contiguous"}
    ranks.values(torch_ranks.call_with_positions, "ring", "positions_k", 999, words)
    answers = ranks.call(torch_ranks.call_with_positions, "ring", "positions_q", 999, words)
    assert all("rope.positions_q[7] is 999" in answer.text for answer in answers)


@pytest.mark.parametrize(
    ("array", "words", "text"),
    [
        ([1, 12, 4], {}, "rank 3 had float32 [1, 12, 4] on cpu"),
        (torch.zeros(1, 8, 4, dtype=torch.float16), {}, "rank 3 had float16 [1, 8, 4] on cpu"),
        ([1, 8, 4], {"causal": True}, "rank 3 had zigzag placement"),
        ([1, 8, 4], {"dim": 2}, "rank 3 had dim=2"),
    ],
)
def test_unshard_of_what_differs(ranks, array, words, text):
    answers = ranks.call(torch_ranks.call_unshard, {3: array}, {3: words})
    on_every_rank(answers, text, "ranks have different calls of unshard: ranks 0, 1, 2 had ")


@pytest.mark.parametrize(
    ("array", "words", "text"),
    [
        ("tokens", {}, "x is builtins.str; allowed: torch.Tensor"),
        ([], {}, "x has no dimension; allowed: a tensor with tokens in dimension 1"),
        ([1, 7, 4], {"causal": True}, "x has 7 tokens on this rank; allowed: an even number"),
        ([1, 8, 4], {"dim": 3}, "dim is 3; allowed: -3 to 2"),
    ],
)
def test_unshard_of_what_is_bad_on_one_rank(ranks, array, words, text):
    answers = ranks.call(torch_ranks.call_unshard, {3: array}, {3: words})
    on_every_rank(answers, "rank 3 of 4 refused the call: ", text)


def test_a_tensor_that_is_spread_already(ranks):
    for answer in ranks.call(torch_ranks.call_with_dtensor):
        assert answer.text == "k is a DTensor; allowed: this rank's part of it, k.to_local()"


def test_groups_that_are_none(ranks):
    for rank, (of_mesh, of_others, of_another_mesh) in enumerate(ranks.values(torch_ranks.strange_groups)):
        assert of_mesh == (
            "group is a DeviceMesh of 2 dimensions, ('data', 'context'); allowed: one of them, such as mesh['context']"
        )
        stranger = f"group does not have this process, rank {rank} of the default group; allowed: "
        assert of_others == ("" if rank < 2 else f"{stranger}a group that has it")
        assert of_another_mesh == ("" if rank < 2 else f"{stranger}a DeviceMesh that has it")


def test_heads_that_do_not_divide(ranks):
    text = "q has 6 heads; allowed with strategy='ulysses' on 4 ranks: a multiple of 4; strategy='ring' or 'all_gather'"
    refused(ranks, {"strategy": "ulysses"}, {}, "ValueError", text, shapes=[[1, 8, 6, 16]] * 3)


# Time -----------------------------------------------------------------------------------------------------------------

PATIENCE = 2.0  # seconds until a rank is given up; what goes well before that takes milliseconds


def test_a_group_of_one_rank_costs_next_to_nothing(ranks):
    assert min(ranks.values(torch_ranks.overhead_of_one_rank, 20)) < 5


def test_a_rank_that_stays_away_is_an_error_in_time(ranks):
    answers = ranks.call(torch_ranks.wait_for_the_last, "ring", False, PATIENCE)
    assert not answers[3].error
    for answer in answers[:3]:
        text = r"after \d{1,2}\.\d s: rank \d of 4 .* lost another rank during the comparison"
        assert re.search(text, answer.text), answer


def test_groups_that_are_mixed_up(ranks):
    """Nothing but time tells; the errors say which group each rank came with."""
    answers = ranks.call(torch_ranks.mix_up_groups, PATIENCE)
    assert "rank 0 of 2 (the group of ranks 0, 1) lost another rank" in answers[0].text
    for rank in (1, 2, 3):
        assert f"rank {rank} of 4 (the group of ranks 0, 1, 2, 3) lost another rank" in answers[rank].text


def test_a_rank_that_leaves_a_ring_is_an_error_in_time(ranks):
    answers = ranks.call(torch_ranks.lose_a_hop, PATIENCE)
    assert answers[3].text == "this rank has stopped"
    for rank in (0, 2):  # which wait for the last, and for one that waits for it
        assert re.search(rf"rank {rank} of 4 .* lost rank \d or \d during a hop of keys and values", answers[rank].text)


def test_a_rank_that_ends_is_an_error_in_time(ranks):
    """The last test: there are but three ranks after it."""
    answers = ranks.call(torch_ranks.wait_for_the_last, "ring", True, PATIENCE)
    assert answers[3].error == "Gone"
    assert all(answer.error == "RuntimeError" and "lost another rank" in answer.text for answer in answers[:3])
