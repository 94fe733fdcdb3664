"""paged_write through every front end on the CPU: the replay's bits in the pages, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qflash
from qflash.testing.page_writes import (
    CASES,
    PageWrite,
    WriteArrays,
    arrays_of,
    check_pools,
    check_written,
    on_device,
    words_of,
)
from qflash.testing.runner import to_torch

PLAIN = PageWrite("float32", rope="half")
INT8 = PageWrite("float16", int8=True, rope="half", mean=True)
PACKED = PageWrite("bfloat16", new=(2, 0, 5), rope="interleaved")


# NumPy ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy_writes_in_place(case):
    x = arrays_of(case)
    wanted, kv = x.replay(), on_device(x)
    assert qflash.paged_write(kv, x.k, x.v, **words_of(x)) is kv
    check_written(x, wanted)
    qflash.paged_write(kv, x.k, x.v, **words_of(x))  # from the cache of plans, and the same again
    check_written(x, wanted)


def test_numpy_takes_lists_of_lengths_and_pages_of_any_strides():
    x = arrays_of(PACKED)
    wanted = x.replay()
    pools = {name: np.zeros((len(pool), 4, 20, 70), pool.dtype)[:, :2, 3:19, 2:66] for name, pool in x.pools.items()}
    for name, pool in x.pools.items():
        pools[name][...] = pool
    kv = qflash.PagedKV(**pools, page_table=x.page_table, lens=x.lens.tolist())
    words = {**words_of(x), "cu_seqlens": x.cu_seqlens.tolist()}
    qflash.paged_write(kv, x.k, x.v, **words)
    check_pools(kv, wanted)


def test_numpy_looks_at_every_call_whether_it_may_write():
    x = arrays_of(PLAIN)
    kv = on_device(x)
    qflash.paged_write(kv, x.k, x.v)
    kv.v_pages.flags.writeable = False
    before = kv.k_pages.copy()
    with pytest.raises(ValueError, match=r"kv.v_pages is read-only"):
        qflash.paged_write(kv, x.k + 1, x.v)
    np.testing.assert_array_equal(kv.k_pages, before)


def test_an_explained_call_names_the_kernels():
    with pytest.raises(qflash.NoKernelError, match="cpu_kv_write"):
        x = arrays_of(PLAIN)
        qflash.paged_write(on_device(x), x.k, x.v, kernel="kv_write")


# PyTorch --------------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")


def torch_call(x: WriteArrays) -> tuple[qflash.PagedKV, Any, Any, dict[str, Any]]:
    return on_device(x, to_torch), to_torch(x.k), to_torch(x.v), words_of(x, to_torch)


def op_arguments(x: WriteArrays) -> tuple[Any, ...]:
    """Of torch.ops.qflash.kv_write."""
    kv, k, v, words = torch_call(x)
    rope = words["rope"]
    pages = (kv.k_pages, kv.v_pages, kv.page_table, kv.lens, kv.k_scale, kv.v_scale, kv.k_mean)
    tables = (None, None, None, False) if rope is None else (rope.cos, rope.sin, rope.positions_k, rope.interleaved)
    *arrays, interleaved = tables
    return k, v, *pages, words["cu_seqlens"], *arrays, kv.layout, interleaved, None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_writes_in_place(case):
    x = arrays_of(case)
    kv, k, v, words = torch_call(x)
    assert qflash.paged_write(kv, k, v, **words) is kv
    check_pools(kv, x.replay())


@pytest.mark.parametrize("case", [PLAIN, INT8, PACKED], ids=str)
def test_torch_compiled(case):
    """The pages are arguments that the program changes; what it reads of them after that is new."""
    x = arrays_of(case)
    kv, k, v, words = torch_call(x)

    def step(kv, k, v, rope, cu_seqlens):
        before = kv.k_pages.float().sum()
        written = qflash.paged_write(kv, k * 1, v, rope=rope, cu_seqlens=cu_seqlens)
        return before, written.k_pages.float().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    first = kv.k_pages.float().sum()
    before, after = compiled(kv, k, v, **words)
    check_pools(kv, x.replay())
    assert before == first and after == kv.k_pages.float().sum() and before != after


def test_torch_compiled_by_inductor():
    x = arrays_of(PLAIN)
    kv, k, v, words = torch_call(x)
    compiled = torch.compile(lambda kv, k, v, rope: qflash.paged_write(kv, k + 0, v, rope=rope).k_pages * 2)
    twice = compiled(kv, k, v, words["rope"])
    check_pools(kv, x.replay())
    assert torch.equal(twice, kv.k_pages * 2)


@pytest.mark.parametrize("case", [PLAIN, INT8, PACKED], ids=str)
def test_torch_opcheck(case):
    torch.library.opcheck(torch.ops.qflash.kv_write.default, op_arguments(arrays_of(case)))


def test_torch_opcheck_of_pools_in_one_allocation():
    arguments = list(op_arguments(arrays_of(PLAIN)))
    both = torch.stack([arguments[2], arguments[3]], 1)
    arguments[2], arguments[3] = both[:, 0], both[:, 1]
    torch.library.opcheck(torch.ops.qflash.kv_write.default, tuple(arguments))


def test_the_torch_op_says_what_it_writes():
    schema = str(torch.ops.qflash.kv_write.default._schema)
    assert schema.endswith("-> ()")
    for name, kind in (("k_pages", ""), ("v_pages", ""), ("k_scale", "?"), ("v_scale", "?")):
        assert f"kv_{name}" in schema
        assert any(f"!){end} kv_{name}," in schema for end in {"?", kind}), schema
    assert schema.count("!") == 4


@pytest.mark.parametrize("name", ["k", "v", "k_pages", "v_pages"])
def test_torch_refuses_tensors_that_require_a_gradient(name):
    kv, k, v, words = torch_call(arrays_of(PLAIN))
    given = {"k": k, "v": v, "k_pages": kv.k_pages, "v_pages": kv.v_pages}
    given[name].requires_grad_()
    argument = name if name in ("k", "v") else f"kv.{name}"
    with pytest.raises(NotImplementedError, match=rf"{argument} requires a gradient and qflash.paged_write is forward"):
        qflash.paged_write(kv, k, v, **words)
    with torch.no_grad():
        qflash.paged_write(kv, k, v, **words)


def test_torch_tells_autograd_of_the_write():
    """Pages that autograd saved and that were written since are no longer what it saved."""
    kv, k, v, words = torch_call(arrays_of(PLAIN))
    factor = torch.ones(1, requires_grad=True)
    product = (kv.k_pages * factor).sum()
    qflash.paged_write(kv, k, v, **words)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_torch_in_inference_mode():
    x = arrays_of(PLAIN)
    with torch.inference_mode():
        kv, k, v, words = torch_call(x)
        kv = replace(kv, k_pages=kv.k_pages.clone(), v_pages=kv.v_pages.clone())
        assert kv.k_pages.is_inference()
        qflash.paged_write(kv, k, v, **words)
    check_pools(kv, x.replay())


def test_torch_refuses_a_negated_view():
    x = arrays_of(PLAIN)
    kv, k, v, _ = torch_call(x)
    negated = torch._neg_view(kv.k_pages)  # what the imaginary part of a conjugate is
    with pytest.raises(
        ValueError, match=r"kv.k_pages is a lazily negated view; allowed: a tensor that qflash.paged_wri"
    ):
        qflash.paged_write(replace(kv, k_pages=negated), k, v)


def test_torch_has_no_vmap_of_it():
    kv, k, v, _ = torch_call(arrays_of(PLAIN))

    def one(k):
        return qflash.paged_write(kv, k, v).k_pages

    with pytest.raises(NotImplementedError, match=r"qflash.paged_write writes to kv.k_pages, .* and has no rule for"):
        torch.func.vmap(one)(torch.stack([k, k]))


# JAX ------------------------------------------------------------------------------------------------------------------

jax = pytest.importorskip("jax")


def jax_call(x: WriteArrays) -> tuple[qflash.PagedKV, Any, Any, dict[str, Any]]:
    turn = jax.numpy.array
    return on_device(x, turn), turn(x.k), turn(x.v), words_of(x, turn)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_returns_new_pages(case):
    x = arrays_of(case)
    kv, k, v, words = jax_call(x)
    written = qflash.paged_write(kv, k, v, **words)
    check_pools(written, x.replay())
    check_pools(kv, x)  # the old ones are what they were
    assert written.page_table is kv.page_table and written.layout == kv.layout


def step(kv, k, v, words):
    return qflash.paged_write(kv, k, v, **words)


def addresses(kv: qflash.PagedKV) -> list[int]:
    pools = (kv.k_pages, kv.v_pages, kv.k_scale, kv.v_scale)
    return [x.unsafe_buffer_pointer() for x in pools if x is not None]


@pytest.mark.parametrize("case", [PLAIN, INT8, PACKED], ids=str)
def test_jax_donated_pages_are_not_copied(case):
    x = arrays_of(case)
    kv, k, v, words = jax_call(x)
    program = jax.jit(step, donate_argnames="kv").lower(kv, k, v, words).compile()
    assert "copy(" not in program.as_text()
    before, pools = addresses(kv), [kv.k_pages, kv.v_pages]
    written = jax.jit(step, donate_argnames="kv")(kv, k, v, words)
    assert addresses(written) == before and all(pool.is_deleted() for pool in pools)
    check_pools(written, x.replay())


@pytest.mark.parametrize("case", [PLAIN, INT8], ids=str)
def test_jax_jit_without_donation_leaves_the_old_pages(case):
    x = arrays_of(case)
    kv, k, v, words = jax_call(x)
    written = jax.jit(step)(kv, k, v, words)
    check_pools(written, x.replay())
    check_pools(kv, x)


def test_jax_reads_of_the_old_pages_are_not_lost():
    """A program that reads them after the write must read what was there, donated or not."""
    x = arrays_of(PLAIN)
    kv, k, v, words = jax_call(x)
    old = np.asarray(kv.k_pages)

    def both(kv, k, v, words):
        written = qflash.paged_write(kv, k, v, **words)
        return written, kv.k_pages + 0

    written, kept = jax.jit(both, donate_argnames="kv")(kv, k, v, words)
    np.testing.assert_array_equal(np.asarray(kept), old)
    check_pools(written, x.replay())


def test_jax_scan_over_steps():
    """Tokens one by one, the pages carried: the same bits as all at once."""
    x = arrays_of(INT8)
    kv, k, v, words = jax_call(x)
    count = x.k.shape[1]

    def one(kv, token):
        t, k, v = token
        lens = kv.lens - (count - 1) + t
        return replace(qflash.paged_write(replace(kv, lens=lens), k, v, **words), lens=kv.lens), None

    tokens = (jax.numpy.arange(count, dtype="int32"), *(y.swapaxes(0, 1)[:, :, None] for y in (k, v)))
    written, _ = jax.jit(lambda kv: jax.lax.scan(one, kv, tokens))(kv)
    check_pools(written, x.replay())


def test_jax_vmap_gives_every_sample_pages_of_its_own():
    x = arrays_of(PLAIN)
    kv, k, v, words = jax_call(x)
    samples = jax.numpy.stack([k, 2 * k])
    pages = jax.vmap(lambda k: qflash.paged_write(kv, k, v, **words).k_pages)(samples)
    for k, page in zip(samples, pages, strict=True):
        np.testing.assert_array_equal(page, qflash.paged_write(kv, k, v, **words).k_pages)


def test_jax_refuses_derivatives():
    kv, k, v, words = jax_call(arrays_of(PLAIN))
    with pytest.raises(NotImplementedError, match=r"qflash.paged_write is forward only and k is being differentiated"):
        jax.grad(lambda k: qflash.paged_write(kv, k, v, **words).k_pages.sum())(k)


@pytest.mark.parametrize("jitted", [False, True])
def test_jax_no_tokens(jitted):
    kv, k, v, words = jax_call(arrays_of(PLAIN))
    call = jax.jit(step) if jitted else step
    written = call(kv, k[:, :0], v[:, :0], words)
    np.testing.assert_array_equal(written.k_pages, kv.k_pages)


# Values that only the kernel sees -------------------------------------------------------------------------------------

BAD_VALUES = {
    "page": (lambda x: x.page_table.__setitem__((0, 0), -1), "page_table"),
    "page past the pool": (lambda x: x.page_table.__setitem__((0, 0), len(x.pools["k_pages"])), "page_table"),
    "length below 0": (lambda x: x.lens.__setitem__(0, 2), "lens"),
    "length past the table": (lambda x: x.lens.__setitem__(1, 49), "lens"),
}


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", BAD_VALUES)
def test_the_cpu_refuses_tokens_without_a_place_and_writes_nothing(name, framework):
    x = arrays_of(PLAIN)
    assert x.page_table.shape == (3, 3) and x.lens[0] == 5
    spoil, text = BAD_VALUES[name]
    spoil(x)
    turn = {"numpy": lambda y: y.copy(), "torch": to_torch, "jax": jax.numpy.array}[framework]
    kv = on_device(x, turn)
    with pytest.raises(ValueError, match=text):
        qflash.paged_write(kv, turn(x.k), turn(x.v), **words_of(x, turn))
    check_pools(kv, x)


@pytest.mark.parametrize("case", [PLAIN, INT8], ids=str)
def test_what_is_written_is_what_attention_reads(case):
    """A whole prompt through pages, against attention on the arrays themselves."""
    x = arrays_of(replace(case, dtype="float32", lens=(7, 7, 7), new=7))
    kv = qflash.paged_write(on_device(x), x.k, x.v, rope=x.rope)
    q = np.random.default_rng(3).standard_normal((3, 2, 4, 64), np.float32)
    got = qflash.attention(q, kv, causal=True, rope=x.rope)
    want = qflash.attention(q, x.k, x.v, causal=True, rope=x.rope)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < (2e-2 if case.int8 else 2e-6)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("pages", "columns"), [(0, 0), (3, 0), (0, 1)])
def test_pools_and_tables_of_nothing(pages, columns, int8, framework):
    """Arrays without elements, which have no address in PyTorch: rows of padding write nothing and see nothing."""
    turn = {"numpy": np.array, "torch": to_torch, "jax": jax.numpy.array}[framework]
    pools = [turn(np.zeros((pages, 2, 16, 64), np.int8 if int8 else np.float32)) for _ in "kv"]
    scales = {f"{x}_scale": turn(np.zeros((pages, 2, 16), np.float32)) for x in "kv"} if int8 else {}
    table, lens = turn(np.full((3, columns), -1, np.int32)), turn(np.zeros(3, np.int32))
    kv = qflash.PagedKV(*pools, table, lens, **scales)
    k = turn(np.ones((3, 2, 2, 64), np.float32))
    out, lse = qflash.attention(k, qflash.paged_write(kv, k, k), return_lse=True)
    assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_packed_rows_of_no_sequence_are_refused_by_name(framework):
    turn = {"numpy": np.array, "torch": to_torch, "jax": jax.numpy.array}[framework]
    pools = (turn(np.zeros((3, 2, 16, 64), np.float32)) for _ in "kv")
    kv = qflash.PagedKV(*pools, turn(np.zeros((0, 2), np.int32)), turn(np.zeros(0, np.int32)))
    x, none = turn(np.ones((5, 2, 64), np.float32)), turn(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[0\] is 0; allowed: 5, the number of rows"):
        np.asarray(qflash.attention_varlen(x, kv, None, none, None, 5, None))
    with pytest.raises(ValueError, match=r"cu_seqlens\[0\] is 0; allowed: 5, the number of rows"):
        np.asarray(qflash.paged_write(kv, x, x, cu_seqlens=none).k_pages)
