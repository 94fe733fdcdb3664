"""Runs a Case on a kernel, through any front end, and checks the result against the contract. Needs no pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import ml_dtypes
import numpy as np

from qflash import api, dispatch
from qflash.call.array import Array
from qflash.call.op import Plan
from qflash.call.prepare import Prepared, prepare
from qflash.call.spec import MOST_DECODE_ROWS
from qflash.frontends import numpy as numpy_frontend
from qflash.kernels.limits import whole_blocks_of_int8
from qflash.ops import attention
from qflash.ops import problem as problems
from qflash.ops.backward_memory import DEFAULT_BACKWARD_MEMORY
from qflash.ops.paged import PagedKV
from qflash.ops.problem import Options, Problem, RopeArrays
from qflash.rotary import Rope
from qflash.testing import compare, emulator, interpreted, kept, oracle, paged
from qflash.testing.case import Case, Inputs

FRAMEWORKS = ("native", "native-cuda", "emulated", "interpreted", "numpy", "torch", "torch-cuda", "jax")
_GUARD = 64  # values on either side of an output that must be unchanged


def run_case(
    case: Case,
    kernel: str | None = None,
    framework: str = "native",
    num_threads: int = 0,
    out_shift: int = 0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of `case` as NumPy arrays.

    "native", "native-cuda", "emulated" and "interpreted" call the kernel's entry on outputs filled with NaN, so that
    values that were not written are detected; all but the second also fail if memory around the outputs was written to.
    The others go through `qflash.attention`. "emulated" runs a CUDA kernel's source on the CPU, in an order determined
    by `seed`, and "interpreted" a Triton kernel's. out_shift: elements between a multiple of 16 bytes and the start of
    out in "native-cuda".
    """
    inputs = case.make_inputs()
    if framework == "native":
        return _run_native(case, inputs, kernel, num_threads)
    if framework == "native-cuda":
        return _run_native_cuda(case, inputs, kernel, out_shift)
    if framework == "emulated":
        return _run_emulated(case, inputs, kernel, seed)
    if framework == "interpreted":
        return interpreted.in_interpreter(run_interpreted, case, kernel)
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework is {framework!r}; allowed: {', '.join(FRAMEWORKS)}")
    if _is_paged(kernel):
        out, lse = _call_paged(case, inputs, kernel, framework)
    elif _is_kept(kernel):
        out, lse = _call_kept(case, inputs, kernel, framework)
    else:
        out, lse = call(case, convert(inputs, framework), kernel)
    return to_numpy(out), to_numpy(lse)


def run_backward(
    case: Case,
    kernel: str = "cpu_bwd",
    framework: str = "native",
    num_threads: int = 0,
    seed: int = 0,
    arch: int | None = None,
    memory: int = DEFAULT_BACKWARD_MEMORY,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq, dk, dv) of a backward kernel for the case's dout and dlse, in poisoned buffers. memory: bytes for dS.

    `framework` is "native", "native-cuda" or "emulated", as in `run_case`. out and lse are from the forward kernel that
    such calls would have run. arch: emulated by "emulated"; None: emulator.arch().
    """
    plan, arrays = planned_backward(case, kernel, framework, num_threads, memory)
    if framework == "native-cuda":
        dq, dk, dv = CudaCall(plan, arrays).run()
        return dq, dk, dv
    grads = [_Guarded(arrays[name].shape, case.dtype) for name in ("q", "k", "v")]
    results = [grad.array for grad in grads]
    if framework == "native":
        launch(prepare(plan), arrays, results, num_threads)
    else:
        emulator.launch(plan, [*(arrays[operand.argument] for operand in plan.operands), *results], seed, arch)
    return tuple(grad.checked(name) for grad, name in zip(grads, ("dq", "dk", "dv"), strict=True))


def planned_backward(
    case: Case, kernel: str, framework: str, num_threads: int = 0, memory: int = DEFAULT_BACKWARD_MEMORY
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a case's gradients, with that much memory for dS, and its arrays by the plan's names for them."""
    inputs = case.make_inputs()
    out, lse = _forward_results(case, kernel, framework, num_threads)
    dout, dlse = case.make_gradients()
    arrays = arrays_of(inputs) | {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    device = {"native": "cpu", "emulated": "cuda"}.get(framework) or _current_gpu()
    problem = problem_of(case, inputs, None, device)
    return replace(attention.plan_of_backward(problem, arrays, True, memory=memory), kernel=kernel), arrays


def _forward_results(case: Case, kernel: str, framework: str, num_threads: int) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) for a backward pass, from a forward kernel that rounds rotated q and k as `kernel` does: where scores
    are large, lse depends on that."""
    keeps_float32 = kernel == "fa_bwd"  # as fa and the CPU engine do; the others multiply 16 bits
    if framework == "native-cuda":
        return run_case(case, "fa" if keeps_float32 else None, framework)
    # The emulator takes seconds where the CPU engine takes milliseconds.
    if framework == "emulated" and case.rope is not None and case.dtype != "float32" and not keeps_float32:
        return run_case(case, "fa_mma", framework)
    return run_case(case, "cpu", "native", num_threads)


def check_backward(
    case: Case,
    kernel: str = "cpu_bwd",
    framework: str = "native",
    seed: int = 0,
    memory: int = DEFAULT_BACKWARD_MEMORY,
) -> compare.Errors:
    """Run the gradients of `case` twice and check them against the contract. Returns the largest error figures."""
    how = f", {kernel!r}, {framework!r}" + (f", seed={seed}" if seed else "")
    how += f", memory={memory}" if memory != DEFAULT_BACKWARD_MEMORY else ""
    first = run_backward(case, kernel, framework, seed=seed, memory=memory)
    errors = compare.check_gradients(case, *first, how=how)
    second = run_backward(case, kernel, framework, seed=seed + 1, memory=memory)
    compare.check_same_bits(case, first, second, how, ("dq", "dk", "dv"), "check_backward")
    return max(errors.values(), key=lambda of: of.relative_l2)


def arrays_of(inputs: Inputs) -> dict[str, Any]:
    """The arrays of a call that exist, by their names in plans."""
    rope = inputs.rope
    tables = {} if rope is None else {f"rope.{name}": getattr(rope, name) for name in _ROPE}
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "kv_lens": inputs.kv_lens, **tables}
    named |= {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k, "sinks": inputs.sinks}
    return {name: x for name, x in named.items() if x is not None}


_ROPE = ("cos", "sin", "positions_q", "positions_k")


def launch(prepared: Prepared, arrays: dict[str, Any], results: Sequence[np.ndarray], num_threads: int = 0) -> None:
    """Call a CPU kernel on unchanged NumPy arrays."""
    if prepared.plan.nothing_to_do:
        for x in results:
            x[...] = 0
        return
    operands = [_address(arrays[operand.argument]) for operand in prepared.plan.operands]
    prepared.call(*operands, *map(_address, results), 0, 0, num_threads)


def check(case: Case, kernel: str | None = None, framework: str = "native", seed: int = 0) -> compare.Errors:
    """Run `case` twice and check it against the contract, as repro lines do. Returns the error figures.

    seed: of the emulator's schedule; the second run uses the next one.
    """
    name = kernel or default_kernel(case, framework)
    how = f", {name!r}, {framework!r}" + (f", seed={seed}" if seed else "")
    first = run_case(case, name, framework, seed=seed)
    variant = dispatch.VARIANTS[name]
    errors = compare.check_contract(
        *(case, *first, variant.contract, how, oracle.integers_of(name)),
        hides_masked_nonfinite_v=variant.kernel.hides_masked_nonfinite_v,
    )
    replay = paged.replayed(case, name) if _is_paged(name) else oracle.replayed(case, name)
    if replay is not None:
        compare.check_replay(case, *first, replay, how, oracle.weights_dtype(case, name))
    if framework != "interpreted":  # which has only one order
        compare.check_same_bits(case, first, run_case(case, name, framework, seed=seed + 1), how)
    return errors


def suited(case: Case, kernel: str, arch: int) -> Case:
    """`case` in a form that `kernel` supports on a GPU of `arch`: in its own dtype if supported, else in one chosen in
    turn, and with the next supported head_dim. Unchanged if the kernel has no code for the GPU."""
    variant = dispatch.VARIANTS[kernel]
    row = variant.kernel
    if row.few_rows and not case.packed:
        q_len = min(case.q_len, MOST_DECODE_ROWS * case.kv_heads // case.q_heads)
        k_len = q_len if case.layout == "fused" else case.k_len
        most = {"q": q_len, "k": k_len, "v": k_len}
        planted = tuple(one for one in case.plant if len(one[1]) < 2 or one[1][1] < most[one[0]])
        lens = None if case.kv_lens is None else tuple(min(length, k_len) for length in case.kv_lens)
        case = replace(case, q_len=q_len, k_len=k_len, plant=planted, kv_lens=lens)
    for head_dim in range(case.head_dim, problems.MAX_HEAD_DIM + 1):
        specs = [variant.spec(arch, dtype, head_dim) for dtype in row.dtypes]
        dtypes = [spec.dtype for spec in specs if not (dispatch.reasons(row, spec) or whole_blocks_of_int8(spec))]
        if dtypes:
            dtype = case.dtype if case.dtype in dtypes else dtypes[case.seed % len(dtypes)]
            return replace(case, dtype=dtype, head_dim=head_dim)
    return case


def refusals(case: Case, kernel: str, arch: int) -> list[str]:
    """Why dispatch rejects `case` for `kernel` on a GPU of `arch`; empty if it is supported."""
    row = dispatch.VARIANTS[kernel].kernel
    plan, _ = planned(case, case.make_inputs(), kernel, row.device)
    return dispatch.reasons(row, plan.spec(arch))


def default_kernel(case: Case, framework: str = "native") -> str:
    """The kernel that dispatch would select for `case`."""
    if framework == "emulated":
        problem = problem_of(case, case.make_inputs(), None, "cuda")
        return dispatch.choose(problem.spec(emulator.arch())).name
    device = "cuda" if framework.endswith("cuda") else "cpu"
    problem = problem_of(case, case.make_inputs(), None, device)
    return dispatch.choose(problem.spec(arch_of(device))).name


def problem_of(case: Case, inputs: Inputs, kernel: str | None, device: str) -> Problem:
    """The checked problem of a case, as a front end would build it."""
    name, precision = named_kernel(kernel)
    options = Options(**case.options(), precision=precision, kernel=name)

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
    kv_lens, sinks = describe("kv_lens", inputs.kv_lens), describe("sinks", inputs.sinks)
    if not case.packed:
        return problems.check(q, k, v, options, kv_lens, rope, sinks)
    cu = (describe("cu_seqlens_q", inputs.cu_seqlens_q), describe("cu_seqlens_k", inputs.cu_seqlens_k))
    return problems.check_packed(q, k, v, *cu, *longest(case), options, kv_lens, rope, sinks)


def _is_paged(kernel: str | None) -> bool:
    return kernel is not None and paged.is_paged(kernel)


def _is_kept(kernel: str | None) -> bool:
    return kernel is not None and kept.is_kept(kernel)


def planned(case: Case, inputs: Inputs, kernel: str | None, device: str) -> tuple[Plan, dict[str, Any]]:
    """The plan of a case on a variant of a kernel, with lse, and its arrays by the plan's names for them."""
    if _is_paged(kernel):
        return paged.plan_of(case, paged.on_pages(case, inputs, kernel), kernel, device)
    if _is_kept(kernel):
        return kept.plan_of(case, kept.on_kept(case, inputs), kernel, device)
    arrays = arrays_of(inputs)
    return attention.plan_of(problem_of(case, inputs, kernel, device), arrays, True), arrays


def _call_paged(case: Case, inputs: Inputs, kernel: str | None, framework: str) -> tuple[Any, Any]:
    """`qflash.attention` or `attention_varlen` on pages, in any framework."""
    pages = paged.on_pages(case, inputs, kernel)
    turn = converter(framework)
    parts = {field.name: getattr(pages.kv, field.name) for field in fields(pages.kv)}
    kv = PagedKV(**{name: turn(x) if isinstance(x, np.ndarray) else x for name, x in parts.items()})
    words = {**case.options(), "rope": _converted_rope(pages.rope, turn), "kernel": named_kernel(kernel)[0]}
    words["sinks"] = None if pages.sinks is None else turn(pages.sinks)
    if case.packed:
        cu = (turn(pages.cu_seqlens_q), None)
        return api.attention_varlen(turn(pages.q), kv, None, *cu, pages.max_seqlen_q, None, return_lse=True, **words)
    return api.attention(turn(pages.q), kv, return_lse=True, **words)


def _call_kept(case: Case, inputs: Inputs, kernel: str | None, framework: str) -> tuple[Any, Any]:
    """`qflash.attention` on a QuantizedKV, in any framework."""
    quantized, turn = kept.on_kept(case, inputs), converter(framework)
    words = {**case.options(), "rope": _converted_rope(quantized.rope, turn), "kernel": named_kernel(kernel)[0]}
    words["sinks"] = None if quantized.sinks is None else turn(quantized.sinks)
    return api.attention(turn(quantized.q), kept.converted(quantized.kv, turn), return_lse=True, **words)


def named_kernel(variant: str | None) -> tuple[str | None, str | None]:
    """The arguments `kernel` and `precision` of a call that requests a variant of a kernel."""
    if variant is None:
        return None, None
    found = dispatch.VARIANTS[variant]
    return found.kernel.name, None if found.precision == "native" else found.precision


def longest(case: Case) -> tuple[int, int]:
    """(max_seqlen_q, max_seqlen_k) of a packed case."""
    return max(case.q_lens, default=0), max(case.k_lens, default=0)


def call(case: Case, inputs: Inputs, kernel: str | None = None, **extra: Any) -> tuple[Any, Any]:
    """`qflash.attention` or `attention_varlen` on arrays of any framework: (out, lse)."""
    name, precision = named_kernel(kernel)
    words = {
        **case.options(),
        "kv_lens": inputs.kv_lens,
        "rope": inputs.rope,
        "sinks": inputs.sinks,
        "precision": precision,
        "kernel": name,
        "return_lse": True,
        **extra,
    }
    if case.packed:
        cu = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        return api.attention_varlen(inputs.q, inputs.k, inputs.v, *cu, *longest(case), **words)
    return api.attention(inputs.q, inputs.k, inputs.v, **words)


def convert(inputs: Inputs, framework: str) -> Inputs:
    """The same arrays in another framework; torch keeps the strides, JAX has none."""
    turn = converter(framework)
    kv_lens, cu_q, cu_k, sinks = (None if x is None else turn(x) for x in _optional(inputs))
    rope = _converted_rope(inputs.rope, turn)
    return Inputs(turn(inputs.q), turn(inputs.k), turn(inputs.v), kv_lens, rope, cu_q, cu_k, sinks)


def _optional(inputs: Inputs) -> tuple[np.ndarray | None, ...]:
    return inputs.kv_lens, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.sinks


def converter(framework: str) -> Callable[[np.ndarray], Any]:
    """A conversion from NumPy's arrays to those of a framework."""
    if framework == "numpy":
        return lambda x: x
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray
    device = "cuda" if framework.endswith("cuda") else "cpu"
    return lambda x: to_torch(x, device)


def _converted_rope(rope: Rope | None, turn: Callable[[np.ndarray], Any]) -> Rope | None:
    if rope is None:
        return None
    positions = (None if x is None else turn(x) for x in (rope.positions_q, rope.positions_k))
    return Rope(turn(rope.cos), turn(rope.sin), rope.interleaved, *positions)


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
    """Any framework's array as a NumPy array."""
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
    """A contiguous output filled with NaN, between two guards that must not be written to."""

    def __init__(self, shape: tuple[int, ...], dtype: str):
        size = int(np.prod(shape))
        whole = np.full(size + 2 * _GUARD, np.nan, dtype)
        self._guards = (whole[:_GUARD], whole[_GUARD + size :])
        self._untouched = whole[:_GUARD].tobytes()
        self.array = whole[_GUARD : _GUARD + size].reshape(shape)

    def checked(self, name: str) -> np.ndarray:
        """The output, or ContractError if a guard was written to."""
        for side, guard in zip(("before", "after"), self._guards, strict=True):
            if guard.tobytes() != self._untouched:
                raise compare.ContractError(f"memory {side} {name} was written to; allowed: only {name} itself")
        return self.array


def _address(x: np.ndarray | None) -> int:
    return 0 if x is None else x.ctypes.data


def _run_native(case: Case, inputs: Inputs, kernel: str | None, num_threads: int) -> tuple[np.ndarray, np.ndarray]:
    plan, arrays = planned(case, inputs, kernel, "cpu")
    out, lse = (_Guarded(result.shape, result.dtype) for result in plan.results)
    launch(prepare(plan), arrays, [out.array, lse.array], num_threads)
    return out.checked("out"), lse.checked("lse")


def _current_gpu() -> str:
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def _run_native_cuda(case: Case, inputs: Inputs, kernel: str | None, out_shift: int) -> tuple[np.ndarray, np.ndarray]:
    plan, arrays = planned(case, inputs, kernel, _current_gpu())
    out, lse = CudaCall(plan, arrays, out_shift).run()
    return out, lse


class CudaCall:
    """A plan on the current GPU with arrays at fixed addresses.

    first_shift: elements between a multiple of 16 bytes and the start of the first result.
    """

    def __init__(self, plan: Plan, arrays: dict[str, Any], first_shift: int = 0):
        import torch

        self._prepared = prepare(plan, arch_of("cuda"))
        self._operands = [to_torch(arrays[operand.argument], "cuda") for operand in plan.operands]
        self._workspace = torch.empty(self._prepared.workspace_bytes, dtype=torch.uint8, device="cuda")
        self._results = []
        for at, result in enumerate(plan.results):
            shift = 0 if at else first_shift
            size = int(np.prod(result.shape)) + shift
            room = torch.empty(size, dtype=getattr(torch, result.dtype), device="cuda")
            self._results.append(room[shift:].view(result.shape))

    def run(self) -> list[np.ndarray]:
        """The results, which are filled with NaN beforehand."""
        import torch

        if self._prepared.plan.nothing_to_do:
            return [to_numpy(x.zero_()) for x in self._results]
        for x in self._results:
            x.fill_(torch.nan)
        addresses = [x.data_ptr() for x in (*self._operands, *self._results, self._workspace)]
        self._prepared.call(*addresses, torch.cuda.current_stream().cuda_stream, 0)
        torch.cuda.synchronize()
        return [to_numpy(x) for x in self._results]


def _run_emulated(case: Case, inputs: Inputs, kernel: str | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    plan, arrays = planned(case, inputs, kernel, "cuda")
    out, lse = (_Guarded(result.shape, result.dtype) for result in plan.results)
    emulator.launch(plan, [*(arrays[x.argument] for x in plan.operands), out.array, lse.array], seed=seed)
    return out.checked("out"), lse.checked("lse")


def run_interpreted(
    case: Case, kernel: str, arch: int = interpreted.ARCH, changed: dict[str, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a Triton kernel, in the interpreter's process. changed: arrays that replace the case's own."""
    plan, arrays = planned(case, case.make_inputs(), kernel, "cuda")
    arrays |= changed or {}
    out, lse = (_Guarded(result.shape, result.dtype) for result in plan.results)
    if plan.nothing_to_do:
        out.array[...], lse.array[...] = 0, 0
    else:
        operands = [arrays[operand.argument] for operand in plan.operands]
        interpreted.launch(plan, [*operands, out.array, lse.array], arch)
    return out.checked("out"), lse.checked("lse")


def arch_of(device: str) -> int:
    """The architecture that kernels are selected for on the current GPU; 0 for the CPU."""
    if device == "cpu":
        return 0
    import torch

    from qflash.frontends.torch.arrays import arch_of_device

    return arch_of_device(torch.device("cuda"))
