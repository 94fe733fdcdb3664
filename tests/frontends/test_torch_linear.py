"""qflash.linear and qflash.swiglu in PyTorch: gradients in every way there is to ask for them, autocast,
QuantizedLinear, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash.ops.linear import LINEAR
from qflash.ops.run import run
from qflash.testing import compare
from qflash.testing.by_kernel import differentiated_by
from qflash.testing.op_cases import check_equal

torch = pytest.importorskip("torch")
functional = torch.nn.functional
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = {
    None: lambda h: h,
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "silu": functional.silu,
}


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    """Calls share their lambdas, and a function may be compiled anew only so often."""
    torch.compiler.reset()


def numbers(*shape: int, dtype=torch.float32, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def inputs(dtype, *, names: str = "xwbr"):
    """x, the weight as F.linear has it, bias and residual; of swiglu two weights and two biases."""
    made = {
        "x": (4, 6, 19), "w": (13, 19), "u": (13, 19), "b": (13,), "c": (13,), "r": (4, 6, 13),
    }  # fmt: skip
    return [numbers(*made[name], dtype=dtype, seed=at) for at, name in enumerate(names)]


# Name -> (inputs that are differentiated, by dtype; qflash's call; PyTorch's).
CALLS = {
    f"linear {activation}": (
        inputs,
        lambda x, w, b, r, activation=activation: qflash.linear(x, w.T, b, activation=activation, residual=r),
        lambda x, w, b, r, act=act: act(functional.linear(x, w, b)) + r,
    )
    for activation, act in ACTIVATIONS.items()
}
CALLS["linear along n"] = (
    lambda dtype: inputs(dtype, names="xw"),
    lambda x, w: qflash.linear(x, (w * 1).T.contiguous(), activation="gelu"),
    lambda x, w: functional.gelu(functional.linear(x, w)),
)
CALLS["swiglu"] = (
    lambda dtype: inputs(dtype, names="xwubcr"),
    lambda x, w, u, b, c, r: qflash.swiglu(x, w.T, u.T, b, c, residual=r),
    lambda x, w, u, b, c, r: functional.silu(functional.linear(x, w, b)) * functional.linear(x, u, c) + r,
)
CALLS["swiglu plain"] = (
    lambda dtype: inputs(dtype, names="xwu"),
    lambda x, w, u: qflash.swiglu(x, w.T, u.T),
    lambda x, w, u: functional.silu(functional.linear(x, w)) * functional.linear(x, u),
)
EVERY = pytest.mark.parametrize("name", CALLS)
SOME = pytest.mark.parametrize("name", ["linear None", "linear gelu", "swiglu"])


def top_of(out):
    return torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype)


def gradients(call, xs):
    out = call(*xs)
    return out, torch.autograd.grad(out, xs, top_of(out))


@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64_and_pytorch(name, dtype):
    """Results and gradients: float32 by the contract's figures, halves within twice PyTorch's own error."""
    make, ours, theirs = CALLS[name]
    xs = make(dtype)
    got, of_got = gradients(ours, xs)
    like, of_like = gradients(theirs, xs)
    exact, of_exact = gradients(theirs, [x.detach().double().requires_grad_() for x in xs])
    for mine, its, want in zip((got, *of_got), (like, *of_like), (exact, *of_exact), strict=True):
        assert (mine.shape, mine.dtype) == (want.shape, dtype)
        want = want.detach().numpy()
        error, allowed = (compare.errors(x.detach().double().numpy(), want).relative_l2 for x in (mine, its))
        if dtype is torch.float32:
            assert error <= compare.GRADIENT_L2["float32"]
        assert error <= 2 * allowed + 1e-7, f"{error:.3g}, PyTorch's {allowed:.3g}"


@EVERY
@pytest.mark.parametrize(
    "way", ["backward", "func", "checkpoint", "reentrant", "compiled", "compiled func", "profiled"]
)
def test_every_way_gives_the_same_bits(name, way):
    make, ours, _ = CALLS[name]
    xs = make(torch.float32)
    _, want = gradients(ours, xs)

    def loss(*xs):
        out = ours(*xs)
        return (out * top_of(out)).sum()

    if way == "backward":
        loss(*xs).backward()
        got = [x.grad for x in xs]
    elif way in ("func", "compiled func"):
        grad = torch.func.grad(loss, argnums=tuple(range(len(xs))))
        if way == "compiled func":
            grad = torch.compile(grad, fullgraph=True, backend="aot_eager")
        with torch.no_grad():  # which is for what is outside of grad
            got = grad(*(x.detach() for x in xs))
    elif way in ("checkpoint", "reentrant"):
        out = torch.utils.checkpoint.checkpoint(ours, *xs, use_reentrant=way == "reentrant")
        got = torch.autograd.grad(out, xs, top_of(out)) if way == "checkpoint" else None
        if got is None:
            out.backward(top_of(out))
            got = [x.grad for x in xs]
    elif way == "compiled":
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        _, got = gradients(compiled, xs)
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            _, got = gradients(ours, xs)
    for mine, one in zip(got, want, strict=True):
        assert torch.equal(mine, one)


@SOME
def test_inductor_trains(name):
    make, ours, _ = CALLS[name]
    xs = make(torch.float32)
    _, want = gradients(ours, xs)
    _, got = gradients(torch.compile(lambda *xs: ours(*xs) * 1, fullgraph=True), xs)
    for mine, one in zip(got, want, strict=True):
        torch.testing.assert_close(mine, one)


@SOME
def test_gradients_per_sample(name):
    """vmap of grad: a weight's gradient for each sample."""
    make, ours, _ = CALLS[name]
    x, *rest = (x.detach() for x in make(torch.float32))
    residual = [rest.pop()]

    def loss(x, residual, *rest):
        out = ours(x, *rest, *residual)
        return (out * top_of(out)).sum()

    grad = torch.func.grad(loss, argnums=tuple(range(2, 2 + len(rest))))
    got = torch.func.vmap(grad, in_dims=(0, 0, *(None for _ in rest)))(x, residual, *rest)
    for i in range(len(x)):
        for mine, want in zip(got, grad(x[i], [residual[0][i]], *rest), strict=True):
            torch.testing.assert_close(mine[i], want)


def test_without_grad_mode_nothing_is_kept_and_nothing_is_written_for_it():
    """The op is asked for one result under no_grad, by whatever watches it, and for what the gradient wants else."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Results(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "qflash" in str(func):
                seen.append(len(out))
            return out

    x, w, b, _ = inputs(torch.float32)
    seen: list[int] = []
    with Results():
        with torch.no_grad():
            qflash.linear(x, w.T, b, activation="gelu")
            qflash.swiglu(x, w.T, w.T)
        with torch.inference_mode():
            qflash.linear(x, w.T, b, activation="gelu")
        qflash.linear(x, w.T, b, activation="gelu")
        qflash.swiglu(x, w.T, w.T)
        qflash.linear(x, w.T, b)  # whose gradient takes no product
    assert seen == [1, 1, 1, 2, 3, 1]


def test_a_compiled_program_follows_the_grad_mode():
    x, w, *_ = inputs(torch.float32)
    programs = []

    def backend(graph, _):
        programs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, w: qflash.linear(x, w.T, activation="gelu"), fullgraph=True, backend=backend)
    with torch.no_grad():
        first = compiled(x, w)
    second = compiled(x, w)
    assert len(programs) == 2 and torch.equal(first, second) and second.requires_grad
    second.sum().backward()
    assert x.grad is not None and w.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_exports(mode):
    """A module's parameters want gradients; its program computes what the module does, in either mode."""

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (torch.nn.Parameter(numbers(*s).detach()) for s in ((8, 5), (8, 5), (5, 8)))

        def forward(self, x):
            return qflash.linear(qflash.swiglu(x, self.gate.T, self.up.T), self.down.T, residual=x)

    module, x = Mlp(), torch.randn(3, 5)
    with mode():
        program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2)}})
        for rows in (3, 7):
            x = torch.randn(rows, 5)
            assert torch.equal(program.module()(x), module(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_program_serves_either_grad_mode():
    """torch.jit.trace runs a function again under no_grad, and compares the graphs."""
    x, w, *_ = (t.detach() for t in inputs(torch.float32))
    traced = torch.jit.trace(lambda x, w: qflash.linear(x, w.T, activation="gelu"), (x, w))
    assert torch.equal(traced(2 * x, w), qflash.linear(2 * x, w.T, activation="gelu"))


def test_only_what_the_backward_pass_reads_is_kept():
    x, w, b, r = inputs(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        qflash.linear(x, w.T, b, residual=r)
        assert kept == [(4, 6, 19), (19, 13), (13,)]  # neither the result nor the residual
        kept.clear()
        qflash.linear(x, w.T, b, activation="silu", residual=r)
        assert kept == [(4, 6, 19), (19, 13), (13,), (4, 6, 13)]


def test_the_gradient_of_the_residual_is_the_results():
    x, w, b, r = inputs(torch.float32)
    out = qflash.linear(x, w.T, b, activation="gelu", residual=r)
    top = top_of(out)
    (got,) = torch.autograd.grad(out, r, top, retain_graph=True)
    assert torch.equal(got, top)
    (got,) = torch.autograd.grad(out.sum(), r)  # one number, expanded
    assert torch.equal(got, torch.ones_like(r))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_float32_result_of_halves_has_gradients(dtype, activation):
    """They are products in the halves' type, as those of a result in it; the residual's is float32."""
    x, w, b, _ = inputs(dtype)
    r = numbers(4, 6, 13)
    out = qflash.linear(x, w.T, b, activation=activation, residual=r, out_dtype="float32")
    assert out.dtype is torch.float32
    top = top_of(out)
    got = torch.autograd.grad(out, (x, w, b, r), top)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b, r)]
    want = torch.autograd.grad(CALLS[f"linear {activation}"][2](*exact), exact, top.double())
    for mine, one, like in zip(got, want, (x, w, b, r), strict=True):
        assert mine.dtype is like.dtype
        error = compare.errors(mine.double().numpy(), one.numpy()).relative_l2
        assert error <= compare.GRADIENT_L2[str(dtype).removeprefix("torch.")]
    assert torch.equal(got[3], top)


def test_strides_of_what_comes_from_above_do_not_matter():
    x, w, b, _ = inputs(torch.float32)
    out = qflash.linear(x, w.T, b, activation="silu")
    for top in (torch.randn(13, 6, 4).permute(2, 1, 0), torch.randn(1, 1, 13).expand(4, 6, 13)):
        got = torch.autograd.grad(out, (x, w, b), top, retain_graph=True)
        want = torch.autograd.grad(out, (x, w, b), top.contiguous(), retain_graph=True)
        assert all(map(torch.equal, got, want))


def test_no_second_derivative_and_no_forward_mode():
    x, w, *_ = inputs(torch.float32)
    out = qflash.linear(x, w.T, activation="gelu")
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"qflash\.linear has no second derivative; allowed: one"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match=r"x has a tangent and qflash\.swiglu has no forward-mode"):
        torch.func.jvp(lambda x: qflash.swiglu(x, w.T.detach(), w.T.detach()), (x.detach(),), (x.detach(),))


def test_opcheck():
    ops = torch.ops.qflash
    x, w, b, r = inputs(torch.float32)
    dense = [t.detach() for t in (x, w.T, b, r)]
    (values, scale), (of_x, x_scale) = (torch.ones(13, 19, dtype=torch.int8), torch.ones(13)), (
        torch.ones(4, 6, 19, dtype=torch.int8), torch.ones(4, 6),
    )  # fmt: skip
    for op, arguments in (
        (ops.linear, (x, w.T, b, r, "gelu", None, True, None)),
        (ops.swiglu, (x, w.T, w.T, b, None, r, None, True, None)),
        (ops.linear_int8, (of_x, values, dense[2], None, x_scale, scale, "silu", "float32", None)),
        (ops.swiglu_int8, (of_x, values, values, None, None, dense[3], x_scale, scale, scale, "float32", None)),
        (ops.linear_backward, (dense[3], dense[0], dense[1], dense[2], dense[3], "gelu", None, True, None)),
        (
            ops.swiglu_backward,
            (dense[3], dense[0], dense[1], dense[1], None, dense[2], dense[3], dense[3], None, True, None),
        ),
        (ops.quantize_linear, (dense[1],)),
        (ops.swiglu_quantize_x, (dense[0],)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    x, w, b, r = inputs(torch.float32)
    product = 2 * 4 * 6 * 19 * 13
    for call, forward in (
        (lambda: qflash.linear(x, w.T, b, activation="gelu", residual=r), product),
        (lambda: qflash.swiglu(x, w.T, w.T), 2 * product),
    ):
        with FlopCounterMode(display=False) as counter:
            out = call()
        assert counter.get_total_flops() == forward
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 2 * forward
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        qflash.linear(x, qflash.quantize_linear(w.T))
    assert counter.get_total_flops() == product


def test_autocast():
    """x, weights and biases are cast, as F.linear's are. The residual is not: it may be a sum that float32 is for."""
    x, w, b, r = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = qflash.linear(x, w.T, b, activation="gelu")
        want = qflash.linear(*(t.bfloat16() for t in (x, w.T, b)), activation="gelu")
        assert got.dtype is torch.bfloat16 and torch.equal(got, want)
        with pytest.raises(
            TypeError, match="residual has dtype float32; allowed: the result's, bfloat16, or out_dtype"
        ):
            qflash.linear(x, w.T, b, residual=r)
        sums = qflash.linear(x, w.T, b, residual=r, out_dtype="float32")
        assert sums.dtype is torch.float32
        got = qflash.swiglu(x, w.T, w.T)
    assert got.dtype is torch.bfloat16
    (sums.sum() + got.float().sum()).backward()
    assert x.grad.dtype is torch.float32 and r.grad.dtype is torch.float32


# INT8 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_quantized_layer(dtype):
    """Of a weight as F.linear has it and of its transpose in memory; eager, compiled, and as NumPy has it."""
    x, w, b, _ = (t.detach() for t in inputs(dtype))
    layer = qflash.quantize_linear(w.T)
    assert isinstance(layer, qflash.QuantizedLinear) and layer.dtype == str(dtype).removeprefix("torch.")
    assert (layer.values.dtype, tuple(layer.values.shape)) == (torch.int8, (13, 19))
    assert (layer.scale.dtype, tuple(layer.scale.shape)) == (torch.float32, (13,))
    other = qflash.quantize_linear(w.T.contiguous())
    assert torch.equal(layer.values, other.values) and torch.equal(layer.scale, other.scale)
    got = qflash.linear(x, layer, b, activation="gelu")
    assert got.dtype is dtype
    assert torch.equal(got, qflash.linear(x, w.T, b, activation="gelu", precision="int8"))
    compiled = torch.compile(
        lambda x, values, scale: qflash.linear(x, qflash.QuantizedLinear(values, scale), b, activation="gelu"),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(x, layer.values, layer.scale), got)
    if dtype is torch.float32:
        in_numpy = qflash.quantize_linear(w.T.numpy())
        check_equal(qflash.linear(x.numpy(), in_numpy, b.numpy(), activation="gelu"), got)


def test_a_row_that_is_quantized_does_not_depend_on_the_others():
    x, w, *_ = (t.detach() for t in inputs(torch.float32))
    layer = qflash.quantize_linear(w.T)
    got = qflash.linear(x, layer)
    assert torch.equal(qflash.linear(x[1, 2], layer), got[1, 2])
    assert torch.equal(torch.func.vmap(lambda x: qflash.linear(x, layer))(x), got)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x, w, b, r: qflash.linear(x, w.detach().T, precision="int8"), "x .* qflash.linear in INT8"),
        (lambda x, w, b, r: qflash.linear(x.detach(), w.T, precision="int8"), "w .* qflash.linear in INT8"),
        (lambda x, w, b, r: qflash.linear(x.detach(), w.detach().T, b, precision="int8"), "bias .* qflash.linear in"),
        (
            lambda x, w, b, r: qflash.swiglu(x, *[qflash.quantize_linear(w.detach().T)] * 2),
            "x .* qflash.swiglu in INT8",
        ),
        (lambda x, w, b, r: qflash.swiglu(x.detach(), w.detach().T, w.T, precision="int8"), "up .* qflash.swiglu in"),
        (lambda x, w, b, r: qflash.quantize_linear(w.T), "w .* qflash.quantize_linear"),
    ],
)
def test_int8_has_no_gradient(call, named):
    xs = inputs(torch.float32)
    name, _, function = named.partition(" .* ")
    with pytest.raises(NotImplementedError, match=rf"^{name} requires a gradient and {function}.* is forward only"):
        call(*xs)
    with pytest.raises(Exception, match=rf"{name} requires a gradient and {function}.* is forward only"):
        torch.compile(lambda *xs: call(*xs) if "quantize" not in function else call(*xs).values, fullgraph=True)(*xs)
    with torch.no_grad():
        call(*xs)


# What is refused, beyond the table of test_bad_input.py -------------------------------------------------------------


def halves(*shape):
    return torch.zeros(shape, dtype=torch.float16)


BAD = {
    "bias of another half": (
        lambda: qflash.linear(halves(2, 4), halves(4, 3), torch.zeros(3, dtype=torch.bfloat16)),
        TypeError,
        "bias has dtype bfloat16; allowed: float32, float16",
    ),
    "two biases": (
        lambda: qflash.swiglu(halves(2, 4), halves(4, 3), halves(4, 3), halves(3), torch.zeros(3)),
        TypeError,
        "up_bias has dtype float32; allowed: gate_bias's, float16",
    ),
    "shapes of two weights": (
        lambda: qflash.swiglu(halves(2, 4), halves(4, 3), halves(4, 5)),
        ValueError,
        r"up has shape \[4, 5\]; allowed: \[4, 3\]",
    ),
    "a weight of torch.nn.Linear as it is": (
        lambda: qflash.linear(halves(2, 4), halves(3, 4)),
        ValueError,
        r"w has shape \[3, 4\]; allowed: \[K, N\] with K .* 4; the weight of a torch.nn.Linear is passed as w.T",
    ),
    "half a layer quantized": (
        lambda: qflash.swiglu(halves(2, 4), qflash.quantize_linear(halves(4, 3)), halves(4, 3)),
        TypeError,
        "up is a Tensor and gate a QuantizedLinear; allowed: both",
    ),
    "integers": (
        lambda: qflash.linear(torch.zeros(2, 4, dtype=torch.int8), torch.zeros(4, 3, dtype=torch.int8)),
        TypeError,
        "x has dtype int8; allowed: float32, float16, bfloat16, which precision='int8' quantizes. Of integers there is "
        "qflash.int8_matmul",
    ),
    "swiglu as an activation": (
        lambda: qflash.linear(halves(2, 4), halves(4, 3), activation="swiglu"),
        ValueError,
        "activation is 'swiglu'; allowed: None, 'gelu', 'gelu_tanh', 'silu'",
    ),
    "out_dtype": (
        lambda: qflash.linear(halves(2, 4), halves(4, 3), out_dtype=torch.bfloat16),
        ValueError,
        "out_dtype is 'bfloat16'; allowed: 'float16', 'float32'",
    ),
    "a long sum of integers": (
        lambda: qflash.linear(halves(1, 131072), halves(131072, 1), precision="int8"),
        ValueError,
        "x has 131072 columns; allowed: at most 131071",
    ),
    "no columns": (
        lambda: qflash.linear(halves(2, 0), halves(0, 3), precision="int8"),
        ValueError,
        r"w has shape \[0, 3\]; allowed: rank 2, \[K, N\], with K 1 or more",
    ),
    "scales of a quantized weight": (
        lambda: qflash.linear(halves(2, 4), qflash.QuantizedLinear(torch.zeros(3, 4, dtype=torch.int8), torch.ones(1))),
        ValueError,
        r"w.scale has shape \[1\]; allowed: \[3\]",
    ),
    "a kernel of floats for integers": (
        lambda: qflash.linear(halves(2, 4), halves(4, 3), precision="int8", kernel="cpu_linear"),
        qflash.NoKernelError,
        "kernel 'cpu_linear' cannot serve this problem: takes precision None, not \"int8\"",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call()


def test_weights_that_run_different_ways_are_taken():
    """A copy of both, because kernels read two weights alike."""
    x, w, *_ = (t.detach() for t in inputs(torch.float32))
    want = qflash.swiglu(x, w.T, 2 * w.T.contiguous())
    assert torch.equal(qflash.swiglu(x, w.T, (2 * w).T), want)
    assert torch.equal(qflash.swiglu(x, w.T.contiguous(), (2 * w).T), want)
    strided = torch.zeros(19, 26)[:, ::2]
    strided.copy_(w.T)
    assert torch.equal(qflash.swiglu(x, strided, (2 * w).T), want)
    halves_of_one = torch.cat([w, 2 * w]).T
    assert torch.equal(qflash.swiglu(x, *halves_of_one.chunk(2, 1)), want)


def test_empty_sizes():
    for m, n, k in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x, w, b = numbers(m, k), numbers(n, k), numbers(n)
        out = qflash.linear(x, w.T, b, activation="gelu")
        assert torch.allclose(out, functional.gelu(functional.linear(x, w, b)), atol=1e-6)
        got = torch.autograd.grad(out, (x, w, b), torch.ones_like(out))
        want = torch.autograd.grad(functional.gelu(functional.linear(x, w, b)).sum(), (x, w, b))
        for mine, one in zip(got, want, strict=True):
            torch.testing.assert_close(mine, one)
    assert qflash.linear(torch.zeros(0, 4), torch.zeros(4, 3), precision="int8").shape == (0, 3)
    assert np.array_equal(qflash.linear(np.zeros((2, 0), "f4"), np.zeros((0, 3), "f4")), np.zeros((2, 3)))


def test_benchmarks_choose_the_kernel_of_gradients():
    """Autograd goes by the kernel that was named, or says why it cannot; the public call has no word for it."""
    x, w, b, _ = inputs(torch.float16)
    out, *_ = run(differentiated_by(LINEAR, "cpu_linear_bwd"), (x, w.T, b, None), ("silu", None, False, None))
    want = torch.autograd.grad(qflash.linear(x, w.T, b, activation="silu").sum(), (x, w, b))
    for mine, one in zip(torch.autograd.grad(out.sum(), (x, w, b)), want, strict=True):
        assert torch.equal(mine, one)
    out, *_ = run(differentiated_by(LINEAR, "sm90_linear_bwd"), (x, w.T, b, None), ("silu", None, False, None))
    with pytest.raises(qflash.NoKernelError, match="'sm90_linear_bwd' cannot serve this problem: runs on cuda"):
        out.sum().backward()
