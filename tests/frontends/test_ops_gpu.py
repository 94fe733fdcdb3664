"""Operations beside attention on a GPU: every CUDA kernel against the CPU's, through torch and JAX."""

from __future__ import annotations

import pytest

import qflash
from qflash import dispatch
from qflash.call.spec import Spec
from qflash.testing.op_cases import CASES, check_close, check_equal, flat
from qflash.testing.runner import arch_of

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_torch")]

PAIRS = [
    pytest.param(case, kernel, id=f"{name}-{kernel}".replace(" ", "_"))
    for name, case in CASES.items()
    for kernel in case.kernels("cuda")
]


def on_gpu(case) -> dict:
    return {key: torch.from_numpy(x).cuda() for key, x in case.arrays.items()}


def test_there_is_a_kernel_for_each_operation():
    assert {pair.values[0].op for pair in PAIRS} == {case.op for case in CASES.values()}


@pytest.mark.parametrize(("case", "kernel"), PAIRS)
def test_torch(case, kernel):
    got = case.call(**on_gpu(case), kernel=kernel)
    assert all(x.is_cuda for x in flat(got))
    check_close(got, case.call(**case.arrays))
    check_equal([x.cpu() for x in flat(case.call(**on_gpu(case), kernel=kernel))], [x.cpu() for x in flat(got)])


@pytest.mark.parametrize(("case", "kernel"), PAIRS)
def test_strides_do_not_matter(case, kernel):
    transposed = {key: x.mT.contiguous().mT if x.dim() > 1 else x for key, x in on_gpu(case).items()}
    check_close(case.call(**transposed, kernel=kernel), case.call(**case.arrays))


@pytest.mark.parametrize(("case", "kernel"), PAIRS)
def test_a_graph_replays_on_new_values(case, kernel):
    xs = on_gpu(case)
    wanted = [x.clone() for x in flat(case.call(**xs, kernel=kernel))]  # loads the kernel, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = flat(case.call(**xs, kernel=kernel))
    for out in outs:
        out.zero_()
    graph.replay()
    check_equal([x.cpu() for x in outs], [x.cpu() for x in wanted])


@pytest.mark.parametrize(("case", "kernel"), PAIRS)
def test_another_stream(case, kernel):
    xs = on_gpu(case)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = case.call(**xs, kernel=kernel)
    torch.cuda.synchronize()
    check_close(got, case.call(**case.arrays))


@pytest.mark.parametrize("name", CASES)
def test_compiled(name):
    case = CASES[name]
    torch.compiler.reset()  # the programs of other cases do not count against this one's
    compiled = torch.compile(lambda **xs: flat(case.call(**xs)), fullgraph=True)
    check_close(compiled(**on_gpu(case)), flat(case.call(**case.arrays)))


@pytest.mark.parametrize(("case", "kernel"), PAIRS)
def test_jax(case, kernel):
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX cannot use the GPU: {error}")
    xs = {key: jax.device_put(x, device) for key, x in case.arrays.items()}
    wanted = case.call(**case.arrays)
    check_close(case.call(**xs, kernel=kernel), wanted)
    check_close(jax.jit(lambda xs: case.call(**xs, kernel=kernel))(xs), wanted)


def test_bad_values_give_nan():
    logits = torch.randn(3, 19, device="cuda")
    for bad in (19, -1, 2**32 + 1):
        losses = qflash.cross_entropy(logits, torch.tensor([0, bad, 1], device="cuda"), reduction="none")
        assert losses.isnan().tolist() == [False, True, False]
    quantized = qflash.quantize(
        torch.randn(2, 12, 3, 8, device="cuda"),
        granularity="token",
        lens=torch.tensor([13, 5], dtype=torch.int32, device="cuda"),
    )
    assert quantized.scale.isnan().all(-1).all(-1).tolist() == [True, False]
    positions = torch.tensor([0, 12, -12, -11, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    lost = qflash.rope(torch.randn(1, 6, 3, 24, device="cuda"), rope_of(12, 16), positions=positions).isnan()
    assert lost[..., :16].all(-1).all(-1).tolist() == [[False, True, True, False, True, True]]
    assert not lost[..., 16:].any()


def rope_of(rows: int, rotary_dim: int, interleaved: bool = False) -> qflash.Rope:
    return qflash.Rope(*(torch.from_numpy(x).cuda() for x in qflash.rope_tables(rows, rotary_dim)), interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (64, 32), (40, 24), (13, 6)])
def test_rope_rotates_as_attention_does(head_dim, rotary_dim, interleaved):
    """The same bits in float32, where what is rotated goes into the products as it is."""
    q, k, v = torch.randn(3, 2, 70, 5, head_dim, device="cuda")
    rope = rope_of(70, rotary_dim, interleaved)
    apart = qflash.attention(qflash.rope(q, rope), qflash.rope(k, rope), v, kernel="fa")
    assert torch.equal(apart, qflash.attention(q, k, v, rope=rope, kernel="fa"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (40, 24), (13, 6)])
def test_rope_goes_back(dtype, head_dim, rotary_dim):
    """By the kernel that was asked for, to what the CPU has."""
    rope = rope_of(70, rotary_dim)
    on_cpu = qflash.Rope(rope.cos.cpu(), rope.sin.cpu())
    x = torch.randn(2, 70, 5, head_dim, dtype=dtype, device="cuda", requires_grad=True)
    top = torch.randn_like(x)
    (got,) = torch.autograd.grad(qflash.rope(x, rope, kernel="rope"), x, top)
    there = x.detach().cpu().requires_grad_()
    (want,) = torch.autograd.grad(qflash.rope(there, on_cpu), there, top.cpu())
    check_close(got.cpu(), want)


def test_empty_arrays():
    none = torch.zeros(0, 5, device="cuda")
    assert qflash.softmax(none).shape == (0, 5)
    targets = torch.zeros(0, dtype=torch.int64, device="cuda")
    assert qflash.cross_entropy(none, targets).isnan() and qflash.cross_entropy(none, targets, reduction="sum") == 0
    a, b = (torch.zeros(shape, dtype=torch.int8, device="cuda") for shape in ((2, 0), (0, 3)))
    # An array without elements counts as one along n, which some kernels do not take.
    spec = Spec("cuda", arch_of("cuda"), "int32", op="linear", precision="int8", layout="n")
    served = [row.name for row in dispatch.kernels_of("linear", "cuda") if not dispatch.reasons(row, spec)]
    for kernel in served:
        assert not qflash.int8_matmul(a, b, kernel=kernel).any()
    assert served
