"""The model of time over many GPUs: its counts against values worked out by hand, its arithmetic against measured
rows, and `qflash parallel plan`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench import limits
from qflash.cli import parallel as cli
from qflash.parallel.model import (
    BACKWARD,
    FORWARD,
    KINDS,
    FixedRate,
    Layer,
    Machine,
    MeasuredRates,
    estimate,
    estimates,
    hidden_from,
)

# Llama 3 of 8B and 70B on 8 GPUs, 600 TFLOP/s, links of 350 GB/s; by hand, in ms: 4 S² Hq D / 2 / 8 / 600e12 and so on
RATES = FixedRate(600e12)
EIGHT = Machine(link=350e9, network=350e9, memory=4.3e12)
SMALL, LARGE = 32, 64  # heads of q; 8 of k
BY_HAND = [
    # tokens, forward of 8B and of 70B, a ring's step and hop (8B)
    (16 * 2**10, 0.46, 0.92, 0.057, 0.024),
    (32 * 2**10, 1.83, 3.7, 0.23, 0.048),
    (128 * 2**10, 29, 59, 3.7, 0.19),
    (2**20, 1880, 3750, 235, 1.5),
]


def llama(tokens: int, q_heads: int = SMALL) -> Layer:
    return Layer(tokens, q_heads, 8, 128)


@pytest.mark.parametrize(("tokens", "small", "large", "step", "hop"), BY_HAND)
def test_arithmetic_and_hops_by_hand(tokens, small, large, step, hop):
    of = {heads: estimate(llama(tokens, heads), 8, "ring", EIGHT, RATES).passes[FORWARD] for heads in (SMALL, LARGE)}
    assert 1e3 * of[SMALL].computing == pytest.approx(small, rel=0.02)
    assert 1e3 * of[LARGE].computing == pytest.approx(large, rel=0.02)
    assert 1e3 * of[SMALL].computing / 8 == pytest.approx(step, rel=0.02)
    assert 1e3 * of[SMALL].moving / 7 == pytest.approx(hop, rel=0.03)
    assert of[SMALL].waiting == 0  # it hides


@pytest.mark.parametrize(("tokens", "small", "large"), [(16, 0.12, 0.22), (32, 0.24, 0.44), (128, 0.98, 1.76)])
def test_exchanges_by_hand(tokens, small, large):
    """q, k, v and out of 7 / 8 of a GPU's tokens, at 300 GB/s."""
    slower = replace(EIGHT, link=300e9)
    for heads, ms in ((SMALL, small), (LARGE, large)):
        found = estimate(llama(tokens * 2**10, heads), 8, "ulysses", slower, RATES).passes[FORWARD]
        assert 1e3 * found.waiting == pytest.approx(ms, rel=0.03)


def test_gathering_by_hand():
    """4096 bytes for a token: 537 MB at 128k tokens, of which 7 / 8 come from others, and 10 times as much at 1M."""
    found = estimate(llama(128 * 2**10), 8, "all_gather", EIGHT, RATES)
    assert found.keys_bytes == 4096 * 128 * 2**10
    assert found.passes[FORWARD].moved_bytes == pytest.approx(537e6 * 7 / 8, rel=1e-3)
    # Backward gathers as much again and sums twice as many bytes, in float32.
    assert found.passes[BACKWARD].moved_bytes == pytest.approx(3 * 537e6 * 7 / 8, rel=1e-3)
    # Each of these numbers, 6 bytes, is read and written, and gradients are added up: 8 bytes of a sum, 2 of a share.
    assert EIGHT.memory * found.passes[BACKWARD].copying == pytest.approx(537e6 / 2 * (2 * 6 + 10), rel=1e-3)


@pytest.mark.parametrize(
    ("kv_heads", "rate", "tokens"),
    [(8, 350e9, 860), (4, 350e9, 430), (32, 350e9, 3400), (8, 45e9, 6700), (4, 45e9, 3300), (32, 45e9, 26700)],
)
def test_where_a_ring_begins_to_hide_its_hops(kv_heads, rate, tokens):
    layer = Layer(2**20, 32, kv_heads, 128)
    found = hidden_from(layer, Machine(rate, rate, 4e12), 8, 600e12)
    assert found == pytest.approx(tokens, rel=0.02)
    for part, hides in ((1.1 * found, True), (0.9 * found, False)):
        one = estimate(replace(layer, tokens=32 * round(part / 2)), 16, "ring", Machine(rate, rate, 4e12), RATES)
        assert (one.passes[FORWARD].waiting == 0) is hides


def test_rounds_of_two_and_four_hops_hide_from_twice_as_many_tokens_on():
    layer = Layer(2**20, 32, 8, 128)
    found = 2 * hidden_from(layer, EIGHT, 8, 600e12)
    for part, hides in ((1.1 * found, True), (0.9 * found, False)):
        one = estimate(replace(layer, tokens=16 * round(part / 2)), 8, "ring", EIGHT, RATES).passes[FORWARD]
        assert (one.waiting == 0) is hides
    hop, call = one.moving / 7, one.computing / 8
    assert one.waiting == pytest.approx(2 * hop - call + 4 * hop - 2 * call)


def test_what_a_ring_holds_by_hand():
    """Parts of 16384 tokens: four hops at hand, four coming, four end to end. Parts of 131072: one and one."""
    for tokens, parts in ((2**17, 12), (2**20, 2)):
        assert estimate(llama(tokens), 8, "ring", EIGHT, RATES).keys_bytes == pytest.approx(4096 * tokens * parts / 8)
    assert estimate(llama(2**14), 2, "ring", EIGHT, RATES).keys_bytes == 4096 * 2**14


def test_a_merge_by_hand():
    """131072 rows of 32 heads: 10 bytes a number at 4.3 TB/s are 1250 µs; a causal mask leaves 3 / 4 of the rows."""
    full = estimate(replace(llama(2**20), causal=False), 8, "ring", EIGHT, RATES).passes[FORWARD]
    assert 1e6 * full.copying / 7 == pytest.approx(1250, rel=0.01)
    causal = estimate(llama(2**20), 8, "ring", EIGHT, RATES).passes[FORWARD]
    assert causal.copying == pytest.approx(0.75 * full.copying)


def test_a_merge_of_a_round_by_hand():
    """Of 8 parts of 16384 tokens three merges in the place of seven, and keys of six hops are copied once."""
    one = estimate(replace(llama(128 * 2**10), causal=False), 8, "ring", EIGHT, RATES).passes[FORWARD]
    keys = 2 * 2 * 16384 * 8 * 128  # bytes of a part
    assert one.copying == pytest.approx((3 * 10 * 16384 * 32 * 128 + 6 * 2 * keys) / EIGHT.memory)


def test_integers_on_the_way_by_hand():
    """128 integers and a scale of 4 bytes in the place of 256 bytes; the part that came is read and written wider."""
    wide, narrow = (
        estimate(replace(llama(2**20), precision=precision), 8, "ring", EIGHT, RATES) for precision in (None, "int8")
    )
    assert set(narrow.passes) == {FORWARD}
    assert narrow.passes[FORWARD].moved_bytes == pytest.approx(wide.passes[FORWARD].moved_bytes * 132 / 256)
    more = EIGHT.memory * (narrow.passes[FORWARD].copying - wide.passes[FORWARD].copying) / 7
    assert more == pytest.approx(2 * 128 * 2**10 * 8 * (132 + 256))
    from_wide, from_narrow = (hidden_from(replace(llama(2**17), precision=p), EIGHT, 8, 600e12) for p in (None, "int8"))
    assert from_narrow == pytest.approx(from_wide * 132 / 256)


def test_one_gpu_computes_and_nothing_else():
    for one in estimates(llama(2**14), 1, EIGHT, RATES):
        assert all(one.passes[kind].moved_bytes == 0 for kind in KINDS), one
        assert all(one.passes[kind].seconds == one.passes[kind].computing for kind in KINDS), one
        assert one.keys_bytes == 4096 * 2**14
        forward, backward = (one.passes[kind].computing for kind in KINDS)
        assert backward == pytest.approx(2.5 * forward)


def test_beyond_a_node_the_network_counts():
    place = replace(EIGHT, network=50e9)
    eight, sixteen = (estimate(llama(2**20), gpus, "all_gather", place, RATES).passes[FORWARD] for gpus in (8, 16))
    assert eight.moving == pytest.approx(eight.moved_bytes / 350e9)
    assert sixteen.moving == pytest.approx(sixteen.moved_bytes / 50e9)


@pytest.mark.parametrize(
    ("layer", "gpus", "text"),
    [
        (llama(2**14), 64, "32 heads of q do not divide over 64 GPUs"),
        (Layer(2**14, 48, 6, 128), 4, "6 heads of k do not divide over 4 GPUs, nor these over the heads"),
    ],
)
def test_strategies_that_do_not_fit(layer, gpus, text):
    assert estimate(layer, gpus, "ulysses", EIGHT, RATES).why_not == text
    assert not estimate(layer, gpus, "ring", EIGHT, RATES).why_not


def test_chunks_must_come_out_even():
    assert estimate(llama(2**14 + 8), 8, "ring", EIGHT, RATES).why_not == "16392 tokens do not make 16 chunks"


def test_heads_of_k_that_several_gpus_need_are_sent_to_each():
    few, many = (estimate(Layer(2**16, 64, heads, 128), 32, "ulysses", EIGHT, RATES) for heads in (8, 32))
    assert few.passes[FORWARD].moved_bytes == many.passes[FORWARD].moved_bytes


# Measured rows --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    return cli._rows("nvidia-h200")


def problems(rows, kind: str, length: int = 0) -> list[dict]:
    """The rows of Hopper's own kernels at head_dim 128; of one length, or of all."""
    kernel = {FORWARD: "sm90_fwd", BACKWARD: "sm90_bwd"}[kind]
    preset = {FORWARD: "sm90", BACKWARD: "backward"}[kind]
    of = [row for row in rows if row["preset"] == preset and row.get("kernel") == kernel and row["D"] == 128]
    return [row for row in of if row["kind"] == kind and row["dtype"] == "bfloat16" and length in (0, row["Tq"])]


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_of_one_gpu_is_what_was_measured(rows, kind):
    """Of every row: the counts of operations are those that rows were made with, and the nearest length is its own.
    Where two presets have measured the same problem the quicker one counts, which is a few percent."""
    rates = MeasuredRates.of_rows(rows, 128, "bfloat16")
    chosen = problems(rows, kind)
    assert len(chosen) >= 6
    for row in chosen:
        layer = Layer(row["Tq"], row["Hq"], row["Hkv"], row["D"], row["causal"], batch=row["B"])
        found = estimate(layer, 1, "all_gather", EIGHT, rates).passes[kind]
        assert 1e6 * found.computing == pytest.approx(row["us"]["p50"], rel=0.06), row


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_that_was_not_measured_is_foretold_by_its_neighbour(rows, kind):
    """Without the rows of 16384 tokens, those of 8192 (4096, backward) say how long these take. Causal gradients of
    4096 tokens reach 0.84 of the rate of 16384, so that this is how far off the estimate is."""
    rates = MeasuredRates.of_rows((row for row in rows if row.get("Tq") != 16384), 128, "bfloat16")
    for row in problems(rows, kind, 16384):
        layer = Layer(16384, row["Hq"], row["Hkv"], 128, row["causal"], batch=row["B"])
        found = estimate(layer, 1, "all_gather", EIGHT, rates).passes[kind]
        assert 1e6 * found.computing == pytest.approx(row["us"]["p50"], rel=0.2), row


def test_the_nearest_length_stands_for_others(rows):
    rates = MeasuredRates.of_rows(rows, 128, "bfloat16")
    assert [rates.measured_length(FORWARD, tokens, True) for tokens in (1, 700, 3000, 2**20)] == [512, 512, 4096, 16384]
    with pytest.raises(LookupError, match="there is no row of kind 'forward'"):
        MeasuredRates.of_rows([], 128, "bfloat16").operations(FORWARD, 512, True)


# The command ----------------------------------------------------------------------------------------------------------


def told(invoke, *words: str, status: int = 0) -> str:
    result = invoke("parallel", "plan", *words)
    assert result.exit_code == status, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_the_command_says_what_it_assumes(invoke):
    said = told(invoke, "--gpus", "8,64", "--tokens", "1M")
    assert "one layer, 1 x 1048576 tokens, 32 / 8 heads of 128, bfloat16, causal" in said
    assert "64 GPUs: no ulysses, because 32 heads of q do not divide over 64 GPUs." in said
    assert "bench/results/nvidia-h200, at the nearest of 512, 1024, 2048, 4096, 8192, 16384 tokens" in said
    assert "450 GB/s: NVLink 4, data sheet of the H200" in said
    assert "64 GPUs: a ring hides its transfers, forward" in said


def test_a_ring_that_there_is_not_hides_nothing(invoke):
    said = told(invoke, "--gpus", "9,8", "--tokens", "64k")
    assert "9 GPUs: no ring, because 65536 tokens do not make 18 chunks." in said
    assert "9 GPUs: a ring" not in said and "8 GPUs: a ring hides its transfers" in said


def test_the_command_takes_other_rates(invoke):
    said = told(invoke, "--gpus", "8", "--tokens", "16k", "--tflops", "600", "--link", "350", "--full")
    assert "Arithmetic runs at 600 TFLOP/s, as asked for" in said and "350 GB/s, as asked for" in said
    assert "8 ring forward 916 µs 58.7 MB 0 µs" in said and "no mask" in said


def test_the_command_on_quantized_attention(invoke):
    """By rows of whole calls; those of kernels without the pass that quantizes are quicker."""
    said = told(invoke, "--gpus", "8", "--tokens", "128k", "--precision", "int8")
    assert "bfloat16, causal, int8" in said and "ring forward" in said and "backward" not in said
    rates = MeasuredRates.of_rows(cli._rows("nvidia-h200"), 128, "bfloat16", "int8")
    whole = [
        row.get("gflops")
        for row in cli._rows("nvidia-h200")
        if row["candidate"] in ("qflash sm90_int8", "qflash fa_int8") and row["D"] == 128 and row["dtype"] == "bfloat16"
    ]
    assert {rate for of in rates.rates.values() for _, rate in of} <= {1e9 * one for one in whole if one}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--gpus", "8", "--tokens", "8k", "--head-dim", "80", "--precision", "int8"),
            "80 and bfloat16 and precision int8",
        ),
        (("--gpus", "8", "--tokens", "many"), "'many' is no count; allowed: a whole number"),
        (("--gpus", "0", "--tokens", "8k"), "'0' is no count"),
        (
            ("--gpus", "8", "--tokens", "8k", "--link", "nan"),
            "'nan' is not a number; allowed: more than 0, up to 1e+09",
        ),
        (("--gpus", "8", "--tokens", "8k", "--machine", "abacus"), "'abacus' has no rows; allowed: "),
        (("--gpus", "8", "--tokens", "8k", "--machine", ".."), "'..' has no rows"),
        (("--gpus", "8", "--tokens", "8k", "--head-dim", "96"), "no rows of forward passes with head_dim 96"),
        (("--gpus", "8", "--tokens", "8k", "--kv-heads", "5"), "5 is no divisor of 32 heads of q"),
    ],
)
def test_what_the_command_refuses(invoke, words, text):
    result = invoke("parallel", "plan", *words)
    assert result.exit_code != 0 and text in " ".join(result.output.replace("│", " ").split()), result.output


def test_without_a_checkout_rates_must_be_given(invoke, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "RESULTS", tmp_path / "none")
    assert "use --tflops" in told(invoke, "--gpus", "8", "--tokens", "8k", status=2)
    told(invoke, "--gpus", "8", "--tokens", "8k", "--tflops", "500")


def test_the_rate_of_memory_is_the_one_that_was_measured():
    assert cli.MEMORY[0] == 1e3 * limits.MEMORY["h200"].rate


def test_rows_of_other_problems_are_left_out():
    row = {"kernel": "k", "D": 64, "dtype": "float16", "precision": "native", "Tq": 8, "Tk": 8, "kind": "forward"}
    row |= {"gflops": 5.0, "causal": True}
    others = [
        row | change for change in ({"D": 32}, {"Tk": 16}, {"precision": "int8"}, {"kernel": None}, {"kv_lens": [3]})
    ]
    rates = MeasuredRates.of_rows([json.loads(json.dumps(row)), *others], 64, "float16")
    assert rates.rates == {("forward", True): ((8, 5e9),)}
