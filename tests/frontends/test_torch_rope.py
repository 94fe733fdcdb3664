"""qflash.rope in PyTorch: gradients of every order, compile, torch.func, vmap, autocast; what is refused."""

from __future__ import annotations

import pytest

import qflash
from qflash.testing.rotations import check_rotated
from qflash.testing.runner import to_numpy

torch = pytest.importorskip("torch")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POSITIONS = torch.tensor([[0, -1, 8, -8, 3, 3], [7, 6, -5, 4, 0, 1]], dtype=torch.int32)
# Words, and x's shape.
CALLS = {
    "half": ({}, (2, 6, 3, 16)),
    "interleaved": ({"interleaved": True}, (2, 6, 3, 16)),
    "each": ({"positions": POSITIONS}, (2, 6, 3, 13)),
    "all": ({"positions": POSITIONS[1], "interleaved": True}, (2, 6, 3, 12)),
    "packed": ({"positions": POSITIONS[0]}, (6, 3, 16)),
}
EVERY = pytest.mark.parametrize("name", CALLS)


def drawn(*shape: int, dtype=torch.float32, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(interleaved=False, **positions):
    return qflash.Rope(*(torch.from_numpy(table) for table in qflash.rope_tables(9, 12)), interleaved, **positions)


def call_of(name: str):
    """The call, x's shape, and a check of its gradient, of that and what comes from above."""
    words, shape = CALLS[name]
    rope, positions = tables(words.get("interleaved", False)), words.get("positions")
    in_numpy = qflash.Rope(rope.cos.numpy(), rope.sin.numpy(), rope.interleaved)
    places = None if positions is None else positions.numpy()

    def check_back(got, top):
        check_rotated(to_numpy(got), to_numpy(top), in_numpy, places, inverse=True)

    return lambda x: qflash.rope(x, rope, positions=positions), shape, check_back


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_the_rotation_back(name, dtype):
    call, shape, check_back = call_of(name)
    x, top = drawn(*shape, dtype=dtype).requires_grad_(), drawn(*shape, dtype=dtype, seed=1)
    (got,) = torch.autograd.grad(call(x), x, top)
    check_back(got, top)


@EVERY
def test_every_order(name):
    """y is linear in x, so d(y³)/dx has further derivatives; PyTorch's own operations have them, too."""
    call, shape, _ = call_of(name)

    def derivatives(call, x):
        (first,) = torch.autograd.grad((call(x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x, create_graph=True)
        (third,) = torch.autograd.grad((second * first).sum(), x)
        return first, second, third

    x = drawn(*shape).requires_grad_()
    matrix = torch.autograd.functional.jacobian(call, x.detach()).double().flatten(0, x.dim() - 1).flatten(1)
    exact = x.detach().double().requires_grad_()
    wants = derivatives(lambda x: (matrix @ x.flatten()).view(shape), exact)
    for got, want in zip(derivatives(call, x), wants, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


@EVERY
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward_give_the_same_bits(name, dynamic):
    torch.compiler.reset()
    call, shape, _ = call_of(name)
    x, top = drawn(*shape).requires_grad_(), drawn(*shape, seed=1)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(x), call(x))
    for got, want in zip(*(torch.autograd.grad(f(x), x, top) for f in (compiled, call)), strict=True):
        assert torch.equal(got, want)


def test_inductor_trains():
    """Between operations of its own, on a part of a projection, as layers have it."""
    torch.compiler.reset()

    def call(x):
        return qflash.rope((x * 2).view(2, 6, 3, 32)[..., :16], tables()) * 3

    x, top = drawn(2, 6, 96).requires_grad_(), drawn(2, 6, 3, 16, seed=1)
    compiled = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(compiled(x), call(x))
    torch.testing.assert_close(*(torch.autograd.grad(f(x), x, top)[0] for f in (compiled, call)))


def test_compiles_for_any_length():
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: qflash.rope(x, tables()), fullgraph=True, dynamic=True, backend=backend)
    for batch, length in ((2, 6), (3, 5), (4, 9)):
        x = drawn(batch, length, 3, 16)
        assert torch.equal(compiled(x), qflash.rope(x, tables()))
    assert len(graphs) == 1
    with pytest.raises(Exception, match=r"rope.cos has 9 rows; allowed: at least "):
        compiled(drawn(2, 10, 3, 16))


@EVERY
def test_func_grad_and_checkpoints_give_the_same_bits(name):
    call, shape, _ = call_of(name)
    x, top = drawn(*shape).requires_grad_(), drawn(*shape, seed=1)
    (want,) = torch.autograd.grad(call(x), x, top)
    (kept,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False), x, top)
    pure = torch.func.grad(lambda x: (call(x) * top).sum())(x.detach())
    assert torch.equal(kept, want) and torch.equal(pure, want)


@EVERY
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
def test_vmap_of_the_backward_pass_is_a_loop(name, in_dims):
    """Of x, of what comes from above, and of both."""
    call, shape, _ = call_of(name)
    many = [drawn(3, *shape, seed=seed) if dim == 0 else drawn(*shape, seed=seed) for seed, dim in enumerate(in_dims)]

    def pull_back(x, top):
        return torch.func.vjp(call, x)[1](top)[0]

    got = torch.vmap(pull_back, in_dims=in_dims)(*many)
    for i in range(3):
        assert torch.equal(got[i], pull_back(*(x[i] if dim == 0 else x for x, dim in zip(many, in_dims, strict=True))))


@pytest.mark.parametrize("shape", [(6, 3, 16), (2, 6, 3, 16)], ids=["packed", "batch"])
@pytest.mark.parametrize("mapped", [("x",), ("positions",), ("x", "positions"), ("x", "rope"), ("rope",)], ids=str)
def test_vmap_is_a_loop(shape, mapped):
    count = 3
    x = drawn(count, *shape)
    positions = torch.randint(-8, 9, (count, shape[-3]), generator=torch.Generator().manual_seed(0)).int()
    many_sines = torch.stack([tables().sin * sign for sign in (1, -1, 0.5)])
    dims = tuple(0 if name in mapped else None for name in ("x", "positions", "rope"))
    arrays = [many if dim == 0 else many[0] for many, dim in zip((x, positions, many_sines), dims, strict=True)]

    def call(x, positions, sin):
        return qflash.rope(x, qflash.Rope(tables().cos, sin), positions=positions)

    got = torch.vmap(call, in_dims=dims)(*arrays)
    for i in range(count):
        assert torch.equal(got[i], call(*(x[i] if dim == 0 else x for x, dim in zip(arrays, dims, strict=True))))


def test_a_batch_of_sequences_is_one_call():
    """One launch for a mapped x, packed or not, with positions for all samples or each."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        shapes: tuple = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.qflash.rope.default:
                self.shapes += (tuple(args[0].shape),)
            return func(*args, **(kwargs or {}))

    for shape, called in (((6, 3, 16), (4, 6, 3, 16)), ((2, 6, 3, 16), (8, 6, 3, 16))):
        for positions in (None, POSITIONS[0]):
            with Count() as count:
                torch.vmap(lambda x, at=positions: qflash.rope(x, tables(), positions=at))(drawn(4, *shape))
            assert count.shapes == (called,)


def test_only_what_the_backward_pass_reads_is_kept():
    x, kept = drawn(2, 6, 3, 16).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        qflash.rope(x, tables(), positions=POSITIONS)
    assert [tuple(t.shape) for t in kept] == [(9, 6), (9, 6), (2, 6)]  # neither x nor the result


def test_what_comes_from_above_may_have_any_strides():
    x = drawn(2, 6, 3, 16).requires_grad_()
    out = qflash.rope(x, tables())
    for top in (drawn(2, 3, 16, 6).permute(0, 3, 1, 2), torch.ones(()).expand(2, 6, 3, 16)):
        (got,) = torch.autograd.grad(out, x, top, retain_graph=True)
        (want,) = torch.autograd.grad(out, x, top.contiguous(), retain_graph=True)
        assert torch.equal(got, want)


def test_a_kernel_that_is_asked_for_serves_both_directions():
    x = drawn(2, 6, 3, 16).requires_grad_()
    qflash.rope(x, tables(), kernel="cpu_rope").sum().backward()
    assert x.grad is not None
    with pytest.raises(qflash.NoKernelError, match="kernel 'rope' cannot serve this problem: runs on cuda"):
        qflash.rope(x, tables(), kernel="rope")


@pytest.mark.parametrize("table", ["cos", "sin"])
def test_gradients_of_tables_are_refused_by_name(table):
    rope = tables()
    getattr(rope, table).requires_grad_()
    x = drawn(2, 6, 3, 16)
    text = f"rope.{table} requires a gradient; allowed: a tensor without one"
    for x in (drawn(2, 6, 3, 16), drawn(2, 6, 3, 16).requires_grad_()):
        with pytest.raises(NotImplementedError, match=text):
            qflash.rope(x, rope)
        with pytest.raises(Exception, match=text):
            torch.compile(qflash.rope, fullgraph=True, backend="aot_eager")(x, rope)
    with torch.no_grad():
        assert torch.equal(qflash.rope(x, rope), qflash.rope(x, tables()))


def test_no_forward_mode():
    x = drawn(2, 6, 3, 16)
    with pytest.raises(NotImplementedError, match=r"x has a tangent and qflash\.rope has no forward-mode"):
        torch.func.jvp(lambda x: qflash.rope(x, tables()), (x,), (x,))


def test_autocast_leaves_it_alone():
    """As it does softmax, and PyTorch's own arithmetic."""
    x = drawn(2, 6, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got = qflash.rope(x, tables())
    assert got.dtype == torch.float32 and torch.equal(got, qflash.rope(x, tables()))


def test_positions_of_any_integer_type():
    x, rope = drawn(2, 6, 3, 16), tables()
    want = qflash.rope(x, rope, positions=POSITIONS)
    for positions in (POSITIONS.long(), POSITIONS.to(torch.int8), POSITIONS.tolist(), POSITIONS.numpy()):
        assert torch.equal(qflash.rope(x, rope, positions=positions), want)
    assert torch.equal(qflash.rope(x, tables(positions_k=POSITIONS.long())), want)
    with pytest.raises(ValueError, match=r"positions\[0\] is 2147483647; allowed: -8 to 8"):
        qflash.rope(x, rope, positions=torch.full((6,), 2**40))


def test_opcheck():
    rope, x = tables(), drawn(2, 6, 3, 16)
    for first in (x, x.clone().requires_grad_(), x[0], x.transpose(1, 2).contiguous().transpose(1, 2)):
        for positions in (None, POSITIONS[0]):
            arguments = (first, rope.cos, rope.sin, positions, None, True, False, None)
            torch.library.opcheck(torch.ops.qflash.rope.default, arguments)
