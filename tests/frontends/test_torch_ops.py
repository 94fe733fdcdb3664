"""Operations beside attention on torch tensors: NumPy's bits, eager, compiled, exported, mapped; gradients refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import qflash
from qflash.testing.op_cases import CASES, check_equal, flat

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    """Cases share their lambdas, and a function may be compiled anew only so often."""
    torch.compiler.reset()


def tensors(case) -> dict:
    return {key: torch.from_numpy(x) for key, x in case.arrays.items()}


@pytest.mark.parametrize("name", CASES)
def test_eager_gives_numpys_bits(name):
    case = CASES[name]
    check_equal(case.call(**tensors(case)), case.call(**case.arrays))


@pytest.mark.parametrize("name", CASES)
def test_strides_do_not_matter(name):
    case = CASES[name]
    transposed = {key: x.mT.contiguous().mT if x.dim() > 1 else x for key, x in tensors(case).items()}
    check_equal(case.call(**transposed), case.call(**case.arrays))


@pytest.mark.parametrize("name", CASES)
def test_compiles_as_one_graph(name):
    case = CASES[name]
    compiled = torch.compile(lambda **xs: flat(case.call(**xs)), fullgraph=True, backend="aot_eager")
    check_equal(compiled(**tensors(case)), flat(case.call(**case.arrays)))


@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "layer_norm",
        "cross_entropy",
        "int8_matmul",
        "linear plain",
        "swiglu of QuantizedLinear",
        "quantize stochastic",
    ],
)
def test_compiles_for_any_length(name):
    case = CASES[name]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda **xs: flat(case.call(**xs)), fullgraph=True, dynamic=True, backend=backend)
    first = next(iter(case.arrays))
    for rows in (len(case.arrays[first]), len(case.arrays[first]) - 1):
        along = [key for key, x in case.arrays.items() if key in (first, "targets")]
        cut = {key: x[:rows] if key in along else x for key, x in case.arrays.items()}
        check_equal(compiled(**{key: torch.from_numpy(x) for key, x in cut.items()}), flat(case.call(**cut)))
    assert len(graphs) == 1


def test_inductor_runs_them():
    case = CASES["layer_norm"]
    compiled = torch.compile(lambda x, weight, bias: case.call(x + 1, weight, bias)[0] * 2, fullgraph=True)
    xs = tensors(case)
    wanted = case.call(case.arrays["x"] + 1, case.arrays["weight"], case.arrays["bias"])[0] * 2
    check_equal(compiled(**xs), wanted)


@pytest.mark.parametrize("name", CASES)
def test_exports(name):
    case = CASES[name]

    class Module(torch.nn.Module):
        def forward(self, **xs):
            return flat(case.call(**xs))

    program = torch.export.export(Module(), (), tensors(case))
    check_equal(program.module()(**tensors(case)), flat(case.call(**case.arrays)))


@pytest.mark.parametrize("name", CASES)
def test_vmap_is_a_loop(name):
    case = CASES[name]
    samples = [
        {key: np.roll(x, i, 0) if key in case.mapped and x.ndim else x for key, x in case.arrays.items()}
        for i in range(3)
    ]
    stacked, in_dims = {}, {}
    for key, x in case.arrays.items():
        mapped = key in case.mapped
        stacked[key] = torch.stack([torch.from_numpy(s[key]) for s in samples], -1) if mapped else torch.from_numpy(x)
        in_dims[key] = x.ndim if mapped else None
    keys = list(stacked)
    got = torch.vmap(
        lambda *xs: flat(case.call(**dict(zip(keys, xs, strict=True)))), in_dims=tuple(in_dims[key] for key in keys)
    )(*stacked.values())
    wanted = [
        np.stack([np.asarray(x) for x in outs]) for outs in zip(*(flat(case.call(**s)) for s in samples), strict=True)
    ]
    check_equal(got, wanted)


@pytest.mark.parametrize("name", CASES)
def test_meta_tensors_tell_shapes(name):
    case = CASES[name]
    got = flat(case.call(**{key: x.to("meta") for key, x in tensors(case).items()}))
    wanted = flat(case.call(**case.arrays))
    assert [(tuple(x.shape), str(x.dtype)[6:]) for x in got] == [(x.shape, x.dtype.name) for x in wanted]


@pytest.mark.parametrize("name", ["quantize"])
def test_gradients_are_refused_by_name(name):
    case = CASES[name]
    first = next(iter(case.arrays))
    xs = tensors(case)
    xs[first].requires_grad_()
    op = name.split()[0]
    with pytest.raises(NotImplementedError, match=f"{first} requires a gradient and qflash.{op} is forward only"):
        case.call(**xs)
    with pytest.raises(Exception, match=f"{first} requires a gradient and qflash.{op} is forward only"):
        torch.compile(lambda **xs: flat(case.call(**xs)), fullgraph=True, backend="aot_eager")(**xs)
    with torch.no_grad():
        check_equal(case.call(**xs), case.call(**case.arrays))
    check_equal(case.call(**{key: x.detach() for key, x in xs.items()}), case.call(**case.arrays))
    plain = tensors(case)
    with pytest.raises(NotImplementedError, match=f"{first} has a tangent and qflash.{op} has no forward-mode"):
        torch.func.jvp(
            lambda x: flat(case.call(**{**plain, first: x}))[0], (plain[first],), (torch.ones_like(plain[first]),)
        )


def test_parameters_are_tensors():
    x, weight = torch.randn(3, 8), torch.nn.Parameter(torch.randn(8))
    wanted = qflash.layer_norm(x.numpy(), weight.detach().numpy())
    check_equal(qflash.layer_norm(x, weight).detach(), wanted)
    with torch.no_grad():
        check_equal(qflash.layer_norm(x, weight), wanted)


def test_opcheck():
    x = torch.randn(3, 8)
    torch.library.opcheck(torch.ops.qflash.softmax.default, (x, 2.0, None))
    torch.library.opcheck(torch.ops.qflash.layer_norm.default, (x, x[0], None, 1e-5, True, None))
    values = torch.randint(-128, 128, (8, 8), dtype=torch.int8)
    torch.library.opcheck(torch.ops.qflash.int8_matmul.default, (values, values.T, None, None, x[0], "float32", None))


BAD = {
    "mixed": (lambda x: qflash.layer_norm(x, np.zeros(8, "f4")), TypeError, "weight is numpy.ndarray; .*as x is"),
    "device": (
        lambda x: qflash.layer_norm(x, torch.zeros(8, device="meta")),
        ValueError,
        "weight is on meta; allowed: x's device, cpu",
    ),
    "sparse": (lambda x: qflash.softmax(x.to_sparse()), TypeError, "x is a sparse_coo tensor; allowed: a dense"),
    "dtype": (lambda x: qflash.softmax(x.double()), TypeError, "x has dtype float64; allowed: float32"),
    "scale": (
        lambda x: qflash.softmax(x, scale=torch.ones(())),
        TypeError,
        "scale is a torch.Tensor; allowed: a number",
    ),
    "complex": (lambda x: qflash.softmax(x.to(torch.complex64)), TypeError, "x has dtype complex64"),
    "out": (
        lambda x: qflash.int8_matmul(x.to(torch.int8), x.T.to(torch.int8), out_dtype=torch.float64),
        ValueError,
        "out_dtype is 'float64'; allowed: 'int32'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call(torch.zeros(3, 8))


def test_framework_dtypes_are_understood():
    a = torch.ones(2, 3, dtype=torch.int8)
    assert qflash.int8_matmul(a, a.T, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    quantized = qflash.quantize(torch.randn(4, 8, dtype=torch.bfloat16))
    assert qflash.dequantize(quantized).dtype == torch.bfloat16
    assert qflash.dequantize(quantized, torch.float16).dtype == torch.float16
    compiled = torch.compile(
        lambda a: qflash.int8_matmul(a, a.T, 0.5, out_dtype=torch.bfloat16), fullgraph=True, backend="aot_eager"
    )
    assert compiled(a).dtype == torch.bfloat16


def test_lazily_negated_views_have_their_sign():
    z = torch.randn(4, 6, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    check_equal(qflash.softmax(x), qflash.softmax(x.resolve_neg()))


def test_a_tensor_without_storage_is_refused():
    x = torch.zeros(3, 8)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="x has no storage"):
        qflash.softmax(x)


def test_the_first_call_may_be_a_compiled_one():
    code = (
        "import torch, qflash\n"
        "f = torch.compile(lambda x: qflash.softmax(x), fullgraph=True, backend='eager')\n"
        "x = torch.randn(2, 3)\n"
        "torch.testing.assert_close(f(x), x.softmax(-1))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
