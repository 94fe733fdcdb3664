"""Run a Case on a kernel, through any front end, and hold the result against the contract. Needs no pytest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from qflash import api, dispatch
from qflash.ops import problem as problems
from qflash.call.array import Array
from qflash.call.spec import Spec
from qflash.frontends import numpy as numpy_frontend
from qflash.ops.problem import Options, Problem, RopeArrays
from qflash.planning import prepare, prepare_backward
from qflash.rope import Rope
from qflash.testing import compare, oracle
from qflash.testing.case import Case, Inputs

FRAMEWORKS = ("native", "native-cuda", "numpy", "torch", "torch-cuda", "jax")
_GUARD = 64  # values on either side of an output that must come back untouched


def run_case(
    case: Case, kernel: str | None = None, framework: str = "native", num_threads: int = 0, out_shift: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of `case` as NumPy arrays.

    "native" and "native-cuda" call the kernel's entry on outputs filled with NaN, so that a value nobody wrote shows;
    "native" also fails if anything around the outputs was touched. The others go through `qflash.attention`. out_shift:
    elements that "native-cuda" lets out begin past a whole 16 bytes.
    """
    inputs = case.make_inputs()
    if framework == "native":
        return _run_native(case, inputs, kernel, num_threads)
    if framework == "native-cuda":
        return _run_native_cuda(case, inputs, kernel, out_shift)
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework is {framework!r}; allowed: {', '.join(FRAMEWORKS)}")
    out, lse = call(case, convert(inputs, framework), kernel)
    return to_numpy(out), to_numpy(lse)


def run_backward(case: Case, kernel: str = "cpu", num_threads: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv) of a CPU kernel for the case's dout and dlse, in poisoned buffers."""
    inputs = case.make_inputs()
    out, lse = _run_native(case, inputs, kernel, num_threads)
    dout, dlse = case.make_gradients()
    problem = problem_of(case, inputs, kernel, "cpu")
    arrays = [inputs.q, inputs.k, inputs.v, out, lse, inputs.kv_lens, inputs.cu_seqlens_q, inputs.cu_seqlens_k]
    arrays += _rope_arrays(inputs.rope)
    grads = [_Guarded(x.shape, case.dtype) for x in (inputs.q, inputs.k, inputs.v)]
    addresses = [_address(x) for x in (*arrays, dout, dlse, *(grad.array for grad in grads))]
    prepare_backward(problem).call(*addresses, 0, num_threads)
    return tuple(grad.checked(name) for grad, name in zip(grads, ("dq", "dk", "dv"), strict=True))


def check(case: Case, kernel: str | None = None, framework: str = "native") -> compare.Errors:
    """Run `case` twice and hold it against the contract: what a repro line calls. Returns the error figures."""
    name = kernel or default_kernel(case, framework)
    how = f", {name!r}, {framework!r}"
    first = run_case(case, name, framework)
    errors = compare.check_contract(case, *first, dispatch.BY_NAME[name].precision, how, oracle.integers_of(name))
    replay = oracle.replayed(case, name)
    if replay is not None:
        compare.check_replay(case, *first, replay, how, oracle.weights_dtype(case, name))
    compare.check_same_bits(case, first, run_case(case, name, framework), how)
    return errors


def suited(case: Case, kernel: str, arch: int) -> Case:
    """`case` as `kernel` takes it on a GPU of `arch`: in its own dtype where it can be, else one by turns, and with the
    next head_dim that is served. As it is where the kernel has no code for the GPU."""
    row = dispatch.BY_NAME[kernel]
    for head_dim in range(case.head_dim, problems.MAX_HEAD_DIM + 1):
        specs = [Spec(row.device, arch, dtype, head_dim, row.precision) for dtype in row.dtypes]
        dtypes = [spec.dtype for spec in specs if not dispatch.reasons(row, spec)]
        if dtypes:
            dtype = case.dtype if case.dtype in dtypes else dtypes[case.seed % len(dtypes)]
            return replace(case, dtype=dtype, head_dim=head_dim)
    return case


def default_kernel(case: Case, framework: str = "native") -> str:
    """The kernel dispatch would choose for `case`."""
    device = "cuda" if framework.endswith("cuda") else "cpu"
    problem = problem_of(case, case.make_inputs(), None, device)
    return dispatch.plan(problem.spec(arch_of(device))).name


def problem_of(case: Case, inputs: Inputs, kernel: str | None, device: str) -> Problem:
    """The checked problem of a case, as a front end would build it."""
    name = dispatch.BY_NAME[kernel].precision if kernel else "native"
    options = Options(**case.options(), precision=None if name == "native" else name, kernel=kernel)

    def describe(what: str, x: np.ndarray | None) -> Array | None:
        if x is None:
            return None
        array = numpy_frontend.describe(what, x)
        return Array(array.shape, array.strides, array.dtype, device)

    q, k, v = describe("q", inputs.q), describe("k", inputs.k), describe("v", inputs.v)
    rope = None
    if inputs.rope is not None:
        names = ("cos", "sin", "positions_q", "positions_k")
        cos, sin, positions_q, positions_k = (describe(f"rope.{n}", getattr(inputs.rope, n)) for n in names)
        rope = RopeArrays(cos, sin, inputs.rope.interleaved, positions_q, positions_k)
    kv_lens = describe("kv_lens", inputs.kv_lens)
    if not case.packed:
        return problems.check(q, k, v, options, kv_lens, rope)
    cu = (describe("cu_seqlens_q", inputs.cu_seqlens_q), describe("cu_seqlens_k", inputs.cu_seqlens_k))
    return problems.check_packed(q, k, v, *cu, *longest(case), options, kv_lens, rope)


def longest(case: Case) -> tuple[int, int]:
    """(max_seqlen_q, max_seqlen_k) of a packed case."""
    return max(case.q_lens, default=0), max(case.k_lens, default=0)


def call(case: Case, inputs: Inputs, kernel: str | None = None, **extra: Any) -> tuple[Any, Any]:
    """`qflash.attention` or `attention_varlen` on arrays of any framework: (out, lse)."""
    precision = dispatch.BY_NAME[kernel].precision if kernel else "native"
    words = {
        **case.options(),
        "kv_lens": inputs.kv_lens,
        "rope": inputs.rope,
        "precision": None if precision == "native" else precision,
        "kernel": kernel,
        "return_lse": True,
        **extra,
    }
    if case.packed:
        cu = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        return api.attention_varlen(inputs.q, inputs.k, inputs.v, *cu, *longest(case), **words)
    return api.attention(inputs.q, inputs.k, inputs.v, **words)


def convert(inputs: Inputs, framework: str) -> Inputs:
    """The same arrays in another framework; torch keeps the strides, JAX has none."""
    if framework == "numpy":
        return inputs
    if framework == "jax":
        import jax.numpy as jnp

        turn = jnp.asarray
    else:
        device = "cuda" if framework.endswith("cuda") else "cpu"

        def turn(x: np.ndarray) -> Any:
            return to_torch(x, device)

    def maybe(x: np.ndarray | None) -> Any:
        return None if x is None else turn(x)

    rope = inputs.rope
    if rope is not None:
        tables = (turn(rope.cos), turn(rope.sin))
        rope = Rope(*tables, rope.interleaved, maybe(rope.positions_q), maybe(rope.positions_k))
    kv_lens, cu_q, cu_k = (maybe(x) for x in (inputs.kv_lens, inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    return Inputs(turn(inputs.q), turn(inputs.k), turn(inputs.v), kv_lens, rope, cu_q, cu_k)


def to_torch(x: np.ndarray, device: str = "cpu") -> Any:
    """A torch tensor with x's values, strides and the memory between them."""
    import torch

    strides = [stride // x.itemsize for stride in x.strides]
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) if x.size else 0
    flat = np.lib.stride_tricks.as_strided(x, (span,), (x.itemsize,)).copy()
    if x.dtype == ml_dtypes.bfloat16:
        memory = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    else:
        memory = torch.from_numpy(flat)
    return memory.to(device).as_strided(x.shape, strides) if x.size else memory.to(device).reshape(x.shape)


def to_numpy(x: Any) -> np.ndarray:
    """Any framework's array as NumPy."""
    if isinstance(x, np.ndarray):
        return x
    if type(x).__module__.partition(".")[0] == "torch":
        import torch

        x = x.detach().cpu()
        if x.dtype == torch.bfloat16:
            return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()
    return np.asarray(x)


class _Guarded:
    """A contiguous output full of NaN, between two guards that nobody may touch."""

    def __init__(self, shape: tuple[int, ...], dtype: str):
        size = int(np.prod(shape))
        whole = np.full(size + 2 * _GUARD, np.nan, dtype)
        self._guards = (whole[:_GUARD], whole[_GUARD + size :])
        self._untouched = whole[:_GUARD].tobytes()
        self.array = whole[_GUARD : _GUARD + size].reshape(shape)

    def checked(self, name: str) -> np.ndarray:
        """The output, or ContractError if a guard was touched."""
        for side, guard in zip(("before", "after"), self._guards, strict=True):
            if guard.tobytes() != self._untouched:
                raise compare.ContractError(f"memory {side} {name} was written to; allowed: only {name} itself")
        return self.array


def _lse_shape(problem: Problem) -> tuple[int, ...]:
    if problem.packed:
        return problem.q_heads, problem.total_q
    return problem.batch, problem.q_heads, problem.q_len


def _address(x: np.ndarray | None) -> int:
    return 0 if x is None else x.ctypes.data


def _rope_arrays(rope: Rope | None) -> list[Any]:
    return [None] * 4 if rope is None else [rope.cos, rope.sin, rope.positions_q, rope.positions_k]


def _run_native(case: Case, inputs: Inputs, kernel: str | None, num_threads: int) -> tuple[np.ndarray, np.ndarray]:
    problem = problem_of(case, inputs, kernel, "cpu")
    out, lse = _Guarded(inputs.q.shape, case.dtype), _Guarded(_lse_shape(problem), "float32")
    arrays = [inputs.q, inputs.k, inputs.v, out.array, lse.array]
    arrays += [inputs.kv_lens, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *_rope_arrays(inputs.rope)]
    prepare(problem).call(*(_address(x) for x in arrays), 0, 0, num_threads)
    return out.checked("out"), lse.checked("lse")


def _run_native_cuda(case: Case, inputs: Inputs, kernel: str | None, out_shift: int) -> tuple[np.ndarray, np.ndarray]:
    import torch

    problem = problem_of(case, inputs, kernel, f"cuda:{torch.cuda.current_device()}")
    prepared = prepare(problem, arch_of("cuda"))
    tensors = convert(inputs, "torch-cuda")
    room = torch.full((inputs.q.size + out_shift,), torch.nan, dtype=getattr(torch, case.dtype), device="cuda")
    out = room[out_shift:].view(inputs.q.shape)
    lse = torch.full(_lse_shape(problem), torch.nan, dtype=torch.float32, device="cuda")
    workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device="cuda")
    arrays = [tensors.q, tensors.k, tensors.v, out, lse, tensors.kv_lens, tensors.cu_seqlens_q, tensors.cu_seqlens_k]
    arrays += [*_rope_arrays(tensors.rope), workspace]
    addresses = [0 if x is None else x.data_ptr() for x in arrays]
    prepared.call(*addresses, torch.cuda.current_stream().cuda_stream, 0)
    torch.cuda.synchronize()
    return to_numpy(out), to_numpy(lse)


def arch_of(device: str) -> int:
    """The architecture kernels are chosen for on the current GPU; 0 for the CPU."""
    if device == "cpu":
        return 0
    import torch

    from qflash.frontends.torch_launch import arch_of_device

    return arch_of_device(torch.device("cuda"))
