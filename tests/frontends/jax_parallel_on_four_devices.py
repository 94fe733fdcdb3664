"""Tests of qflash.parallel.jax. test_jax_parallel.py runs them in a process where XLA splits the CPU in eight; most of
them take four of these."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import qflash
from qflash.parallel import jax as parallel
from qflash.testing.case import Case, Rotary
from qflash.testing.compare import check_contract, check_gradients
from qflash.testing.runner import convert, to_numpy
from qflash.testing.sink_gradients import check_sink_gradient

STRATEGIES = ["ring", "all_gather", "ulysses"]
BASE = {"q_len": 32, "k_len": 32, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "batch": 2}
PACKED = {"q_heads": 4, "kv_heads": 4, "head_dim": 32, "q_lens": (3, 17, 0, 12), "k_lens": (3, 17, 0, 12)}
SINKS = ("0.5", "-2", "1", "0")
EVERYWHERE = [
    Case("full", **BASE),
    Case("causal", **BASE, causal=True),
    Case("causal_bfloat16", **BASE, causal=True, dtype="bfloat16"),
    Case("window_both_ways", **BASE, window=(9, 5)),
    Case("softcap_sinks", **BASE, causal=True, softcap=5.0, scale=0.3, sinks=SINKS),
    Case("rope_positions", **BASE, causal=True, window=(12, 0), rope=Rotary(16, True, "per_batch")),
    Case("lens_rope", **BASE, kv_lens=(32, 13), rope=Rotary(32)),
    Case("packed_rope", **PACKED, causal=True, rope=Rotary(32)),
]
GATHERED = [
    Case("lens_causal", **BASE, causal=True, kv_lens=(32, 13)),
    Case("packed_window", **PACKED, causal=True, window=(9, 0)),
]
CHOSEN = [
    *((case, strategy) for case in EVERYWHERE for strategy in STRATEGIES),
    *((case, "all_gather") for case in GATHERED),
]


@pytest.fixture(scope="session")
def mesh():
    return mesh_of(4)


def mesh_of(ranks: int):
    return jax.make_mesh((ranks,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


def specs(case: Case, axis: str = "context") -> tuple[P, P]:
    """Of q, k, v and out, and of lse."""
    return (P(axis), P(None, axis)) if case.packed else (P(None, axis), P(None, None, axis))


def placed(case: Case, placement: str, ranks: int = 4):
    """shard and unshard of this placement."""
    dim = 0 if case.packed else 1
    how = {"ranks": ranks, "placement": placement}
    return (
        lambda x, last=False: parallel.shard(x, dim=x.ndim - 1 if last else dim, **how),
        lambda x, last=False: to_numpy(parallel.unshard(x, dim=x.ndim - 1 if last else dim, **how)),
    )


def program(mesh, case: Case, strategy: str, placement: str, inputs, check_vma: bool = True, **more):
    """(q, k, v, sinks) in the order of devices -> out, lse; compiled by whoever calls it."""
    rope = inputs.rope
    given = {} if rope is None or rope.positions_q is None else {"q": rope.positions_q, "k": rope.positions_k}
    words = {**case.options(), "kv_lens": inputs.kv_lens, **more}
    if case.packed:
        words |= {"cu_seqlens": inputs.cu_seqlens_q, "max_seqlen": max(case.q_lens)}
    of_arrays, of_lse = specs(case)
    of_positions = {name: P(*[None] * (x.ndim - 1), "context") for name, x in given.items()}

    def local(q, k, v, sinks, positions):
        own = rope if not positions else replace(rope, positions_q=positions["q"], positions_k=positions["k"])
        return parallel.attention(
            q, k, v, axis_name="context", strategy=strategy, placement=placement, sinks=sinks, rope=own,
            return_lse=True, **words,
        )  # fmt: skip

    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(of_arrays,) * 3 + (P(), of_positions), out_specs=(of_arrays, of_lse),
        check_vma=check_vma,
    )  # fmt: skip
    order, _ = placed(case, placement, mesh.size)
    positions = {name: order(x, last=True) for name, x in given.items()}
    return lambda q, k, v, sinks: spread(q, k, v, sinks, positions)


@pytest.mark.parametrize(("case", "strategy"), CHOSEN, ids=lambda x: getattr(x, "name", x))
def test_four_devices(mesh, case, strategy):
    """With the placement that is its default."""
    check(mesh, case, strategy, "zigzag" if case.causal else "contiguous")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "case", [case for case in EVERYWHERE if case.name in ("causal", "window_both_ways")], ids=lambda x: x.name
)
def test_the_other_placement(mesh, case, strategy):
    check(mesh, case, strategy, "contiguous" if case.causal else "zigzag")


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        (Case("eight_causal", **BASE, causal=True, rope=Rotary(16, True)), "ring"),
        (Case("eight_packed", **PACKED, causal=True, window=(9, 0)), "all_gather"),
        (Case("eight_lens", **(BASE | {"q_heads": 8}), causal=True, kv_lens=(32, 13)), "ulysses"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_eight_devices(case, strategy):
    check(mesh_of(8), case, strategy, "zigzag")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("case", "strategy"), CHOSEN, ids=lambda x: getattr(x, "name", x))
def test_every_placement(case, strategy, placement, ranks):
    check(mesh_of(ranks), case if ranks == 4 else replace(case, q_heads=8), strategy, placement)


def check(mesh, case: Case, strategy: str, placement: str) -> None:
    """Results and gradients within the contract, and the same bits twice."""
    inputs = convert(case.make_inputs(), "jax")
    order, whole = placed(case, placement, mesh.size)
    run = program(mesh, case, strategy, placement, inputs)
    arrays = (*(order(x) for x in (inputs.q, inputs.k, inputs.v)), inputs.sinks)
    dout, dlse = (jnp.asarray(x) for x in case.make_gradients())
    cotangents = order(dout), order(dlse, last=True)

    @jax.jit
    def differentiated(arrays, cotangents):
        results, pull_back = jax.vjp(run, *arrays)
        return results, pull_back(cotangents)

    (out, lse), (dq, dk, dv, dsinks) = first = differentiated(arrays, cotangents)
    check_contract(case, whole(out), whole(lse, last=True))
    check_gradients(case, *(whole(x) for x in (dq, dk, dv)))
    if case.sinks:
        check_sink_gradient(case, to_numpy(dsinks))
    again = differentiated(arrays, cotangents)
    same = jax.tree.map(lambda a, b: to_numpy(a).tobytes() == to_numpy(b).tobytes(), first, again)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        *((Case("int8", **BASE, causal=True, rope=Rotary(32)), strategy) for strategy in STRATEGIES),
        (Case("int8_lens", **BASE, kv_lens=(32, 13), sinks=SINKS), "ring"),
        (Case("int8_biased", **BASE, causal=True, data="biased_k", dtype="bfloat16"), "ring"),
        (Case("int8_window", **BASE, window=(9, 5), rope=Rotary(16, True, "per_batch")), "ring"),
        (Case("int8_packed", **PACKED, causal=True, rope=Rotary(32), dtype="float16"), "ring"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_quantized(mesh, case, strategy):
    inputs = convert(case.make_inputs(), "jax")
    order, whole = placed(case, "zigzag")
    run = program(mesh, case, strategy, "zigzag", inputs, precision="int8")
    arrays = [order(x) for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = jax.jit(run)(*arrays, inputs.sinks)
    check_contract(case, whole(out), whole(lse, last=True), precision="int8")
    with pytest.raises(NotImplementedError, match=r"forward only|has no backward pass"):
        jax.jit(jax.grad(lambda q: run(q, *arrays[1:], inputs.sinks)[0].sum()))(arrays[0])


def collectives(function, *operands) -> dict[str, int]:
    """How many of each kind a program asks for. (XLA may find two that are the same, on the CPU across a barrier.)"""
    text = jax.jit(function).lower(*operands).as_text()
    kinds = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter", "optimization_barrier")
    counts = {kind: text.count(f"stablehlo.{kind}") for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


@pytest.mark.parametrize(
    ("strategy", "forward", "backward"),
    [
        # Backward, keys and values go round a second time, with their gradients behind them and one hop more.
        ("ring", {"collective_permute": 3}, {"collective_permute": 3 + 3 + 3 + 1, "optimization_barrier": 1}),
        ("all_gather", {"all_gather": 1}, {"all_gather": 2, "reduce_scatter": 1, "optimization_barrier": 1}),
        ("ulysses", {"all_to_all": 3}, {"all_to_all": 6}),
    ],
)
def test_what_moves(mesh, strategy, forward, backward):
    """q, k and v in one exchange, out and lse in one each; nothing is gathered in a ring. What moves again in a
    backward pass does so behind a barrier, so that nobody keeps what came the first time."""
    case = Case("moves", **BASE, causal=True)
    inputs = convert(case.make_inputs(), "jax")
    run = program(mesh, case, strategy, "zigzag", inputs)
    arrays = [jax.device_put(x, jax.NamedSharding(mesh, specs(case)[0])) for x in (inputs.q, inputs.k, inputs.v)]

    def gradient(q, k, v):
        results, pull_back = jax.vjp(lambda *x: run(*x, None), q, k, v)
        return pull_back(results)

    assert collectives(lambda *x: run(*x, None), *arrays) == forward
    assert collectives(gradient, *arrays) == backward


def test_what_moves_of_quantized_keys_and_values(mesh):
    """Three hops of integers, a scale for each token of a head, and a mean for each channel of a head."""
    case = Case("moves", **BASE, dtype="bfloat16", causal=True)
    inputs = convert(case.make_inputs(), "jax")
    run = program(mesh, case, "ring", "zigzag", inputs, precision="int8")
    text = jax.jit(lambda *x: run(*x, None)).lower(inputs.q, inputs.k, inputs.v).as_text()
    moved = re.findall(r"stablehlo.collective_permute.*-> tensor<(\w+)>", text)
    assert Counter(moved) == {"4x8x2x32xi8": 3, "4x2x8xf32": 3, "4x2x32xf32": 3}  # k and v of two sequences


def test_what_only_hopper_has_is_refused_in_the_words_of_attention(mesh):
    x = jnp.zeros((1, 32, 4, 32))
    attend = partial(qflash.attention, precision="int8_fp8")
    spread = jax.shard_map(
        partial(parallel.attention, axis_name="context", precision="int8_fp8"),
        mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"),
    )  # fmt: skip
    said = []
    for function in (attend, spread):
        with pytest.raises(qflash.NoKernelError) as error:
            jax.jit(function)(x, x, x)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_checks_of_varying_axes(mesh, strategy):
    case = Case("unchecked", **BASE, causal=True, sinks=SINKS)
    inputs = convert(case.make_inputs(), "jax")
    order, whole = placed(case, "zigzag")
    run = program(mesh, case, strategy, "zigzag", inputs, check_vma=False)
    out, lse = jax.jit(run)(*(order(x) for x in (inputs.q, inputs.k, inputs.v)), inputs.sinks)
    check_contract(case, whole(out), whole(lse, last=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_under_vmap(mesh, strategy):
    """What moves between devices moves for every sequence of the mapped axis; scattered sums of gradients, too."""
    attend = jax.shard_map(
        partial(parallel.attention, axis_name="context", strategy=strategy, causal=True),
        mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"),
    )  # fmt: skip
    gradient = jax.grad(lambda q, k, v: (attend(q, k, v) ** 2).sum(), (0, 1, 2))
    arrays = jax.random.normal(jax.random.key(0), (3, 2, 1, 16, 4, 16))
    batched = jax.jit(jax.vmap(gradient))(*arrays)
    for one in range(2):
        for got, want in zip(batched, jax.jit(gradient)(*arrays[:, one]), strict=True):
            np.testing.assert_allclose(got[one], want, rtol=1e-5, atol=1e-6)


def self_attention(mesh, strategy: str):
    """Of one array, which is q, k and v."""
    return jax.shard_map(
        lambda x: parallel.attention(x, x, x, axis_name="context", strategy=strategy),
        mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"),
    )  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_mode_is_refused(mesh, strategy):
    attend = self_attention(mesh, strategy)
    x = jnp.ones((1, 16, 4, 16))
    with pytest.raises(NotImplementedError, match="attention has no forward-mode derivative"):
        jax.jvp(jax.jit(attend), (x,), (x,))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_second_derivatives_are_refused(mesh, strategy):
    attend = self_attention(mesh, strategy)
    first = jax.grad(lambda x: (attend(x) ** 2).sum())
    second = jax.grad(lambda x: (first(x) ** 2).sum())
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        jax.jit(second)(jnp.ones((1, 16, 4, 16)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sequences_of_nothing(mesh, strategy):
    for words in ({"causal": True}, {"window": (3, 2)}):
        attend = jax.shard_map(
            partial(parallel.attention, axis_name="context", strategy=strategy, **words),
            mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"),
        )  # fmt: skip
        x = jnp.zeros((1, 0, 4, 16))
        out, pull_back = jax.vjp(jax.jit(attend), x, x, x)
        assert {y.shape for y in (out, *pull_back(out))} == {x.shape}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operation_by_operation(strategy):
    """The bits of the program that is compiled as one. Here XLA compiles each operation alone, which takes seconds:
    hence two devices, and one program in all other tests."""
    attend = self_attention(mesh_of(2), strategy)
    x = jax.random.normal(jax.random.key(0), (1, 8, 4, 16))
    np.testing.assert_array_equal(attend(x), jax.jit(attend)(x))


def test_beside_another_axis():
    """Sequences over one axis of a mesh, tokens over the other."""
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    case = Case("both", **BASE, causal=True, sinks=SINKS)
    inputs = convert(case.make_inputs(), "jax")
    split = P("data", "context")
    how = {"ranks": 2, "causal": True}
    dout = jnp.asarray(case.make_gradients()[0])
    want = jax.vjp(
        lambda q, k, v, sinks: qflash.attention(q, k, v, causal=True, sinks=sinks),
        inputs.q, inputs.k, inputs.v, inputs.sinks,
    )[1](dout)  # fmt: skip
    for strategy in STRATEGIES:
        local = partial(parallel.attention, axis_name="context", strategy=strategy, causal=True)
        spread = jax.shard_map(
            lambda q, k, v, sinks, local=local: local(q, k, v, sinks=sinks),
            mesh=mesh, in_specs=(split,) * 3 + (P(),), out_specs=split,
        )  # fmt: skip
        arrays = [parallel.shard(x, **how) for x in (inputs.q, inputs.k, inputs.v)]
        out, pull_back = jax.vjp(jax.jit(spread), *arrays, inputs.sinks)
        *gradients, dsinks = pull_back(parallel.shard(dout, **how))
        check_contract(case, to_numpy(parallel.unshard(out, **how)))
        for got, expected in zip((*(parallel.unshard(x, **how) for x in gradients), dsinks), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_positions_are_those_of_the_placement(mesh, causal):
    own = jax.shard_map(
        lambda: parallel.positions(16, axis_name="context", causal=causal),
        mesh=mesh,
        in_specs=(),
        out_specs=P("context"),
    )()
    np.testing.assert_array_equal(own, parallel.shard(jnp.arange(16), ranks=4, dim=0, causal=causal))
    np.testing.assert_array_equal(parallel.unshard(own, ranks=4, dim=0, causal=causal), jnp.arange(16))


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"strategy": "star"}, ValueError, "strategy is 'star'; allowed: 'ring', 'all_gather', 'ulysses'"),
        ({"axis_name": "model"}, ValueError, "axis_name is 'model', and the call is not in a shard_map over an axis"),
        ({"axis_name": 3}, TypeError, "axis_name is 3"),
        ({"causal": True, "kv_lens": jnp.array([3], jnp.int32)}, ValueError, "'all_gather' or 'ulysses' takes it"),
        ({"max_seqlen": 3}, ValueError, "max_seqlen is 3 and cu_seqlens is None"),
        (
            {"kv_lens": jnp.array([33], jnp.int32)},
            ValueError,
            r"kv_lens\[0\] is 33; allowed: 0 to 32, the tokens of all",
        ),
        ({"strategy": "ulysses"}, ValueError, "q has 6 heads; allowed with strategy='ulysses' on 4 ranks"),
        ({"rope": qflash.Rope(*map(jnp.asarray, qflash.rope_tables(8, 16)))}, ValueError, "at least 32, one for each"),
        ({"cu_seqlens": jnp.array([0, 32], jnp.int32)}, ValueError, r"q has shape \(1, 8, 6, 16\); allowed: rank 3"),
        ({"window": (1, 2, 3)}, ValueError, "window is"),
    ],
)
def test_bad_input(mesh, words, error, text):
    refused(mesh, jnp.zeros((1, 32, 6, 16)), P(None, "context"), words, error, text)


@pytest.mark.parametrize(
    ("offsets", "error", "text"),
    [
        (jnp.array([[0, 32]], jnp.int32), ValueError, r"cu_seqlens has shape \(1, 2\); allowed: \[sequences \+ 1\]"),
        (jnp.array([0.0, 32.0]), TypeError, "cu_seqlens has dtype float32; allowed: int32"),
        (
            jnp.array([0, 5, 30], jnp.int32),
            ValueError,
            "cu_seqlens begins with 0 and ends with 30; allowed: from 0 to 32",
        ),
        (np.array([0, 9, 3, 32], np.int32), ValueError, r"cu_seqlens\[2\] is 3 after 9; allowed: 9 to 41"),
    ],
)
def test_bad_offsets(mesh, offsets, error, text):
    refused(mesh, jnp.zeros((32, 6, 16)), P("context"), {"cu_seqlens": offsets}, error, text)


@pytest.mark.parametrize("offsets", [[0, 5, 30], [0, 5, 40], [0, 9, 3, 32], [1, 32]], ids=str)
def test_bad_offsets_that_are_not_known_before_the_program_runs(mesh, offsets):
    """Cut to a chunk they could be good: then results would be those of other sequences."""
    x = jnp.zeros((32, 6, 16))
    local = partial(parallel.attention, axis_name="context", strategy="all_gather")
    attend = jax.shard_map(
        lambda x, offsets: local(x, x, x, cu_seqlens=offsets),
        mesh=mesh,
        in_specs=(P("context"), P()),
        out_specs=P("context"),
    )
    with pytest.raises(Exception, match="cu_seqlens"):
        jax.block_until_ready(jax.jit(attend)(x, jnp.array(offsets, jnp.int32)))


def refused(mesh, x, spec: P, words: dict, error: type, text: str) -> None:
    local = partial(parallel.attention, **({"axis_name": "context"} | words))
    with pytest.raises(error, match=text):
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(x, x, x)


def test_lengths_that_do_not_divide():
    with pytest.raises(
        ValueError, match="x has 30 tokens in dimension 1; allowed: a multiple of 8, two chunks for each"
    ):
        parallel.shard(jnp.zeros((1, 30, 2, 8)), ranks=4, causal=True)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        ("tokens", TypeError, "x is builtins.str; allowed: jax.Array or numpy.ndarray"),
        (jnp.zeros(()), ValueError, "x has no dimension; allowed: an array with tokens in dimension 1"),
    ],
)
def test_what_cannot_be_sharded(x, error, text):
    for function in (parallel.shard, parallel.unshard):
        with pytest.raises(error, match=text):
            function(x, ranks=4)
