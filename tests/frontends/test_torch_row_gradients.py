"""Gradients of softmax, layer_norm and cross_entropy in PyTorch: autograd, compile, torch.func, checkpoints."""

from __future__ import annotations

import pytest

import qflash
from qflash.testing import compare

torch = pytest.importorskip("torch")
functional = torch.nn.functional
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TARGETS = torch.tensor([[0, 18, -100], [3, 4, 5], [1, 1, 1], [9, 2, -100]])


def rows(*shape: int, dtype=torch.float32, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


# Name -> (inputs that are differentiated, by dtype; qflash's call; PyTorch's).
CALLS = {
    "softmax": (
        lambda dtype: [rows(4, 3, 19, dtype=dtype)],
        lambda x: qflash.softmax(x, scale=0.7),
        lambda x: torch.softmax(0.7 * x, -1),
    ),
    "layer_norm": (
        lambda dtype: [rows(4, 3, 19, dtype=dtype), rows(19, dtype=dtype, seed=1), rows(19, dtype=dtype, seed=2)],
        lambda x, weight, bias: qflash.layer_norm(x, weight, bias, eps=1e-3),
        lambda x, weight, bias: functional.layer_norm(x, (19,), weight, bias, 1e-3),
    ),
    "layer_norm bias": (
        lambda dtype: [rows(4, 3, 19, dtype=dtype), rows(19, dtype=dtype, seed=2)],
        lambda x, bias: qflash.layer_norm(x, None, bias),
        lambda x, bias: functional.layer_norm(x, (19,), None, bias),
    ),
    "cross_entropy": (
        lambda dtype: [rows(4, 3, 19, dtype=dtype)],
        lambda x: qflash.cross_entropy(x, TARGETS, label_smoothing=0.1),
        lambda x: functional.cross_entropy(x.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
    ),
    "cross_entropy sum": (
        lambda dtype: [rows(4, 3, 19, dtype=dtype)],
        lambda x: qflash.cross_entropy(x, TARGETS, reduction="sum"),
        lambda x: functional.cross_entropy(x.flatten(0, 1), TARGETS.flatten(), reduction="sum"),
    ),
    "cross_entropy none": (
        lambda dtype: [rows(4, 3, 19, dtype=dtype)],
        lambda x: qflash.cross_entropy(x, TARGETS, reduction="none"),
        lambda x: functional.cross_entropy(x.flatten(0, 1), TARGETS.flatten(), reduction="none").view(4, 3),
    ),
}
EVERY = pytest.mark.parametrize("name", CALLS)


def top_of(out):
    return torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype)


def gradients(call, inputs):
    out = call(*inputs)
    return torch.autograd.grad(out, inputs, top_of(out))


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(name, dtype):
    make, ours, theirs = CALLS[name]
    inputs = make(dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wants = torch.autograd.grad(theirs(*exact), exact, top_of(ours(*inputs)).double())
    for x, got, want in zip(inputs, gradients(ours, inputs), wants, strict=True):
        assert got.dtype == x.dtype and got.shape == x.shape
        error = compare.errors(got.double().numpy(), want.numpy()).relative_l2
        assert error <= compare.GRADIENT_L2[str(dtype)[6:]], f"off by {error:.3g}"


@EVERY
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward_give_the_same_bits(name, dynamic):
    make, ours, _ = CALLS[name]
    inputs = make(torch.float32)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for got, want in zip(gradients(compiled, inputs), gradients(ours, inputs), strict=True):
        assert torch.equal(got, want)


@EVERY
def test_func_grad_and_checkpoints_give_the_same_bits(name):
    make, ours, _ = CALLS[name]
    inputs = make(torch.float32)
    wants = gradients(ours, inputs)

    def loss(*inputs):
        out = ours(*inputs)
        return (out * top_of(out)).sum()

    kept = gradients(lambda *x: torch.utils.checkpoint.checkpoint(ours, *x, use_reentrant=False), inputs)
    pure = torch.func.grad(loss, tuple(range(len(inputs))))(*(x.detach() for x in inputs))
    for want, *gots in zip(wants, kept, pure, strict=True):
        assert all(torch.equal(got, want) for got in gots)


@EVERY
def test_no_second_derivative(name):
    make, ours, _ = CALLS[name]
    inputs = make(torch.float32)
    out = ours(*inputs)
    grads = torch.autograd.grad(out, inputs, top_of(out), create_graph=True)
    operation = name.split()[0]
    with pytest.raises(NotImplementedError, match=rf"^qflash\.{operation} has no second derivative; allowed: one"):
        grads[0].sum().backward()


@EVERY
def test_no_forward_mode(name):
    make, ours, _ = CALLS[name]
    inputs = [x.detach() for x in make(torch.float32)]
    with pytest.raises(NotImplementedError, match=r"has a tangent and qflash\..* has no forward-mode"):
        torch.func.jvp(ours, tuple(inputs), tuple(inputs))


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "cross_entropy none"])
def test_vmap_of_the_backward_pass_is_a_loop(name, in_dims):
    """Of x, of what comes from above, and of both."""
    make, ours, _ = CALLS[name]
    x, *more = (x.detach() for x in make(torch.float32))
    top = top_of(ours(x, *more)) + 1
    many = [
        torch.stack([one, one * 2, one - 1]) if dim == 0 else one for one, dim in zip((x, top), in_dims, strict=True)
    ]

    def pull_back(x, top):
        return torch.func.vjp(ours, x, *more)[1](top)

    got = torch.vmap(pull_back, in_dims=in_dims)(*many)
    for i in range(3):
        wants = pull_back(*(one[i] if dim == 0 else one for one, dim in zip(many, in_dims, strict=True)))
        for one, want in zip(got, wants, strict=True):
            torch.testing.assert_close(one[i], want, rtol=1e-6, atol=1e-6)


def test_statistics_and_lse_are_differentiable():
    x = rows(5, 37)
    exact = x.detach().double().requires_grad_()
    mean, var = exact.mean(-1), exact.var(-1, correction=0)
    tops = [top_of(mean), top_of(mean).flip(0)]
    (want,) = torch.autograd.grad((mean, (var + 1e-5).rsqrt()), exact, tops)
    _, *stats = qflash.layer_norm(x, return_stats=True)
    (got,) = torch.autograd.grad(stats, x, [one.float() for one in tops])
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-6)

    (want,) = torch.autograd.grad(torch.logsumexp(exact, -1), exact, tops[0])
    _, lse = qflash.cross_entropy(x, torch.full((5,), -100), reduction="sum", return_lse=True)
    (got,) = torch.autograd.grad(lse, x, tops[0].float())
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-6)


def test_only_what_the_backward_pass_reads_is_kept():
    x, weight = rows(3, 8), rows(8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for call, shapes in (
            (lambda: qflash.softmax(x), [(3, 8)]),  # the result, not x
            (lambda: qflash.layer_norm(x, weight), [(3, 8), (8,), (3,), (3,)]),  # x, not the result
            (lambda: qflash.cross_entropy(x, torch.zeros(3, dtype=torch.int32)), [(3, 8), (3,), (3,)]),
        ):
            kept.clear()
            call()
            assert [tuple(t.shape) for t in kept] == shapes
            if call().shape == x.shape and len(shapes) == 1:
                assert kept[0].data_ptr() != x.data_ptr()


def test_strides_of_what_comes_from_above_do_not_matter():
    x = rows(6, 8)
    out = qflash.softmax(x)
    top = torch.randn(8, 6).T  # columns with gaps
    (got,) = torch.autograd.grad(out, x, top, retain_graph=True)
    (want,) = torch.autograd.grad(out, x, top.contiguous(), retain_graph=True)
    assert torch.equal(got, want)
    (got,) = torch.autograd.grad(out.sum() * 2, x, retain_graph=True)  # one number, expanded
    (want,) = torch.autograd.grad(out, x, torch.full((6, 8), 2.0))
    assert torch.equal(got, want)


def test_a_kernel_that_is_asked_for_is_the_forward_passs():
    x = rows(3, 8)
    qflash.softmax(x, kernel="cpu_softmax").sum().backward()
    assert x.grad is not None


def test_what_was_written_to_since_is_refused():
    x = rows(3, 8)
    out = qflash.softmax(x)
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_opcheck():
    ops = torch.ops.qflash
    x, vector, per_row = rows(3, 8), rows(8), torch.randn(3)
    dense, scale, targets, total = x.detach(), vector.detach(), torch.tensor([0, 7, -100]), torch.tensor(1.5)
    for op, arguments in (
        (ops.softmax, (x, 2.0, None)),
        (ops.layer_norm, (x, vector, vector, 1e-5, True, None)),
        (ops.cross_entropy, (x, targets, "mean", -100, 0.1, True, None)),
        (ops.softmax_backward, (dense, dense, 2.0, None)),
        (ops.layer_norm_backward, (dense, None, per_row, dense, scale, None, per_row, per_row, 1e-5, True, None)),
        (ops.cross_entropy_backward, (per_row, None, total, dense, targets, per_row, "mean", -100, 0.1, True, None)),
    ):  # fmt: skip
        torch.library.opcheck(op.default, arguments)
