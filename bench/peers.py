"""The candidates of a problem: qflash's kernels through each front end, and their alternatives.

A candidate gets the same numbers in its preferred layout; conversion is never timed. Building one raises `Unavailable`
with the reason if it does not support the problem here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import qflash
from bench.arrays import Arrays, Candidate, load
from bench.compiled import compiled
from bench.paged import qflash_pages
from bench.paged_peers import FA3_MODULES, decoding_peers
from bench.presets import BACKWARD, DECODE, MIXED, TRAIN, Preset
from bench.run import Unavailable, tried
from bench.tutorial import triton_tutorial
from qflash import dispatch, machine
from qflash.testing import Case
from qflash.testing.runner import to_torch
from qflash.testing.timing import Call

# qflash


def _options(case: Case, kernel: str) -> dict[str, Any]:
    precision = dispatch.VARIANTS[kernel].precision
    name = dispatch.VARIANTS[kernel].kernel.name
    return {"causal": case.causal, "kernel": name, "precision": None if precision == "native" else precision}


def _eager(qkv: tuple[Any, ...], case: Case, kernel: str, **words: Any) -> Call:
    q, k, v = qkv
    options = _options(case, kernel) | words
    return lambda: qflash.attention(q, k, v, **options)


def qflash_numpy(kernel: str) -> Candidate:
    return _qflash(kernel, "numpy", lambda arrays: _eager(arrays.numpy, arrays.case, kernel))


def qflash_torch(kernel: str) -> Candidate:
    return _qflash(kernel, "torch", lambda arrays: _eager(arrays.torch, arrays.case, kernel))


def qflash_rope(kernel: str) -> Candidate:
    def make(arrays: Arrays) -> Call:
        return _eager(arrays.torch, arrays.case, kernel, rope=arrays.torch_rope)

    return replace(_qflash(kernel, "torch", make), name=f"qflash {kernel}, rope", rope=True)


def qflash_jax(kernel: str) -> Candidate:
    def make(arrays: Arrays) -> Call:
        options = _options(arrays.case, kernel)
        call = load("jax").jit(lambda q, k, v: qflash.attention(q, k, v, **options))
        return lambda: call(*arrays.jax)

    return _qflash(kernel, "jax", make)


def qflash_quantized(kernel: str) -> Candidate:
    """A kernel on q and k quantized beforehand, which is not timed: in the same way as by precision="int8"."""

    def make(arrays: Arrays) -> Call:
        q, k, v = arrays.torch
        q8 = qflash.quantize(q, granularity="token")
        k8 = qflash.quantize(k, granularity="group", group=16, smooth=True)
        causal, name = arrays.case.causal, dispatch.VARIANTS[kernel].kernel.name
        return lambda: qflash.attention(q8, k8, v, causal=causal, kernel=name)

    name = f"qflash {kernel.removesuffix('_quantized')} (kernel alone)"
    return Candidate(name, make, kernel=kernel, precision=dispatch.VARIANTS[kernel].precision)


def _kept(arrays: Arrays, kernel: str) -> qflash.QuantizedKV:
    _, k, v = arrays.torch
    return qflash.quantize_kv(k, v, precision=dispatch.VARIANTS[kernel].precision)


def qflash_kv(kernel: str) -> Candidate:
    """A kernel on a QuantizedKV: k and v were quantized beforehand, which is not timed; q is quantized in the call."""

    def make(arrays: Arrays) -> Call:
        q, kv, causal = arrays.torch[0], _kept(arrays, kernel), arrays.case.causal
        name = dispatch.VARIANTS[kernel].kernel.name
        return lambda: qflash.attention(q, kv, causal=causal, kernel=name)

    name = f"qflash {kernel.removesuffix('_kv')} (kv ready)"
    precision = dispatch.VARIANTS[kernel].precision
    return Candidate(name, make, kernel=kernel, precision=precision, int8_keys=precision == "int8")


def qflash_alone(kernel: str) -> Candidate:
    """The same without the quantization of q: without a q, the kernel's entry uses the quantized q of the last call.

    That call is made once, with q, so the timed calls compute the same output; its error is checked like any other's.
    """

    def make(arrays: Arrays) -> Call:
        torch = load("torch")
        from qflash.frontends.torch import launch
        from qflash.ops.attention_kv import ATTENTION_KEPT, kept_call
        from qflash.ops.problem import Options

        q = arrays.torch[0]
        options = Options(causal=arrays.case.causal, kernel=dispatch.VARIANTS[kernel].kernel.name)
        given, words = kept_call(q, _kept(arrays, kernel), None, options, None, None, None, False)
        prepared = launch.find_ready(ATTENTION_KEPT, given, words).prepared
        operands = [given[ATTENTION_KEPT.arrays.index(operand.argument)] for operand in prepared.plan.operands]
        (out,) = launch.empty_results(prepared.plan, q)
        workspace = torch.empty(prepared.workspace_bytes, dtype=torch.uint8, device=q.device)
        first, *others = operands  # named, so that they outlive the calls

        def run(q_address: int) -> Any:
            addresses = (x.data_ptr() for x in (*others, out, workspace))
            prepared.call(q_address, *addresses, torch.cuda.current_stream().cuda_stream, 0)
            return out

        run(first.data_ptr())
        return lambda: run(0)

    name = f"qflash {kernel.removesuffix('_kv')} (kernel alone)"
    return Candidate(name, make, kernel=kernel, precision=dispatch.VARIANTS[kernel].precision)


def qflash_torch_train(kernel: str) -> Candidate:
    def make(arrays: Arrays) -> Call:
        options = _options(arrays.case, kernel)
        return _with_gradients(arrays, arrays.torch, lambda q, k, v: qflash.attention(q, k, v, **options))

    return _qflash(kernel, "torch", make)


def qflash_backward(kernel: str) -> Candidate:
    """A backward kernel alone, on out and lse of the forward kernel that dispatch selects."""

    def make(arrays: Arrays) -> Call:
        torch = load("torch")
        from qflash.call.prepare import prepare
        from qflash.frontends.torch import launch
        from qflash.frontends.torch.arrays import arch_of_device, describe
        from qflash.ops import attention
        from qflash.ops.problem import Options, check

        q, k, v = arrays.torch
        options = Options(causal=arrays.case.causal)
        out, lse = qflash.attention(q, k, v, causal=options.causal, return_lse=True)
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": to_torch(arrays.dout, arrays.device)}
        problem = check(*(describe(name, given[name]) for name in "qkv"), options)
        plan = replace(attention.plan_of_backward(problem, given, False), kernel=kernel)
        prepared = prepare(plan, arch_of_device(q.device))
        operands = [given[operand.argument] for operand in plan.operands]

        def run() -> Any:
            results = launch.empty_results(plan, q)
            workspace = torch.empty(
                prepared.workspace_bytes, dtype=torch.uint8, device=q.device
            )  # counted as its memory
            stream = torch.cuda.current_stream().cuda_stream if arrays.device == "cuda" else 0
            prepared.call(*(x.data_ptr() for x in (*operands, *results, workspace)), stream, 0)
            return results[0]

        return run

    return _qflash(kernel, "torch", make)


def _qflash(kernel: str, framework: str, make) -> Candidate:
    precision = dispatch.VARIANTS[kernel].precision
    return Candidate(f"qflash {kernel}", make, kernel=kernel, precision=precision, framework=framework)


# PyTorch


def _sdpa(arrays: Arrays):
    F = load("torch").nn.functional
    case = arrays.case
    if case.causal and case.q_len != case.k_len:
        raise Unavailable("is_causal is aligned to the top left")
    grouped = case.q_heads != case.kv_heads
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)


def torch_sdpa() -> Candidate:
    def make(arrays: Arrays) -> Call:
        call = _sdpa(arrays)
        q, k, v = arrays.torch_bhtd
        return lambda: call(q, k, v)

    return Candidate("torch SDPA", make, bhtd=True)


# "flash" is FlashAttention 2 in every torch so far; the others have torch's names.
SDPA_BACKENDS = {
    "FLASH_ATTENTION": "torch FA2",
    "CUDNN_ATTENTION": "torch SDPA cudnn",
    "EFFICIENT_ATTENTION": "torch SDPA efficient",
}


def torch_sdpa_backend(backend: str) -> Candidate:
    def make(arrays: Arrays) -> Call:
        attention = load("torch.nn.attention")
        call = _sdpa(arrays)
        q, k, v = arrays.torch_bhtd
        chosen = getattr(attention.SDPBackend, backend)

        def run():
            with attention.sdpa_kernel(chosen):
                return call(q, k, v)

        return tried(run)

    return Candidate(SDPA_BACKENDS[backend], make, bhtd=True)


def torch_sdpa_train() -> Candidate:
    def make(arrays: Arrays) -> Call:
        return _with_gradients(arrays, arrays.torch_bhtd, _sdpa(arrays), bhtd=True)

    return Candidate("torch SDPA", make, bhtd=True)


def torch_sdpa_backward(backend: str) -> Candidate:
    """The backward pass of one of torch's backends alone: the forward pass ran once, beforehand."""

    def make(arrays: Arrays) -> Call:
        torch = load("torch")
        attention = load("torch.nn.attention")
        leaves = [x.detach().clone().requires_grad_() for x in arrays.torch_bhtd]
        dout = to_torch(arrays.dout, arrays.device).transpose(1, 2).contiguous()

        def forward():
            with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
                return _sdpa(arrays)(*leaves)

        out = tried(forward)()
        return tried(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)[0])

    return Candidate(SDPA_BACKENDS[backend], make, bhtd=True)


def _naive(arrays: Arrays) -> Callable[[Any, Any, Any], Any]:
    """matmul, softmax, matmul: a typical first version, with the scores in memory."""
    torch = load("torch")
    case = arrays.case
    scale = 1 / math.sqrt(case.head_dim)
    group = case.q_heads // case.kv_heads
    mask = None
    if case.causal:
        ones = torch.ones(case.q_len, case.k_len, dtype=torch.bool, device=arrays.torch[0].device)
        mask = ones.triu(1 + case.k_len - case.q_len)

    def attend(q: Any, k: Any, v: Any) -> Any:
        keys, values = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        scores = (q @ keys.transpose(-1, -2)) * scale
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        return torch.softmax(scores, -1) @ values

    return attend


def torch_naive() -> Candidate:
    def make(arrays: Arrays) -> Call:
        attend = _naive(arrays)
        q, k, v = arrays.torch_bhtd
        return lambda: attend(q, k, v)

    return Candidate("torch naive", make, bhtd=True)


def torch_compiled() -> Candidate:
    """The naive version compiled by PyTorch, which may recognize it as attention and call SDPA."""

    def make(arrays: Arrays) -> Call:
        attend = compiled(_naive(arrays))
        q, k, v = arrays.torch_bhtd
        return tried(lambda: attend(q, k, v))

    return Candidate("torch.compile", make, bhtd=True)


def _with_gradients(arrays: Arrays, tensors, attention, bhtd: bool = False) -> Call:
    """Forward and backward as one call; its result is dq."""
    torch = load("torch")
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    dout = to_torch(arrays.dout, arrays.device)
    if bhtd:
        dout = dout.transpose(1, 2).contiguous()
    return lambda: torch.autograd.grad(attention(*leaves), leaves, dout)[0]


# JAX and others


def jax_nn(implementation: str | None = None, wait: bool = True) -> Candidate:
    """jax.nn.dot_product_attention, jitted. `wait`: a call returns when the result is ready."""

    def make(arrays: Arrays) -> Call:
        jax = load("jax")
        case = arrays.case
        if case.causal and case.q_len != case.k_len:
            raise Unavailable("is_causal is aligned to the top left")
        options = {"is_causal": case.causal, "implementation": implementation}
        call = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options))
        waited = tried(lambda: jax.block_until_ready(call(*arrays.jax)))
        return waited if wait else lambda: call(*arrays.jax)

    return Candidate(" ".join(("jax.nn", implementation or "")).strip(), make, framework="jax")


def flash_attn(name: str, *modules: str) -> Candidate:
    """FlashAttention 2 or 3 from the first of `modules` that is installed."""

    def make(arrays: Arrays) -> Call:
        function = load(*modules).flash_attn_func
        q, k, v = arrays.torch
        if q.dtype == load("torch").float32:
            raise Unavailable("takes no float32")
        causal = arrays.case.causal

        def run():
            out = function(q, k, v, causal=causal)
            return out[0] if isinstance(out, tuple) else out

        return tried(run)

    return Candidate(name, make)


def flash_attn_3() -> Candidate:
    """FlashAttention 3 as built from its own repository, or the PyPI package fa3-fwd."""
    return flash_attn("FlashAttention 3", *FA3_MODULES)


E4M3_MOST = 448.0


def e4m3_by_head(x: Any, heads: int) -> tuple[Any, Any]:
    """x `[B, T, H, D]` as E4M3 with a scale for each of `heads` groups of heads, `[B, heads]`."""
    torch = load("torch")
    grouped = x.float().unflatten(2, (heads, -1))
    scale = grouped.abs().amax((1, 3, 4)).clamp(min=1e-30) / E4M3_MOST
    return (grouped / scale[:, None, :, None, None]).flatten(2, 3).to(torch.float8_e4m3fn), scale


def flash_attn_3_fp8() -> Candidate:
    """FlashAttention 3 on E4M3 arrays: their cast, with a scale per head, is done beforehand and not timed."""

    def make(arrays: Arrays) -> Call:
        function = load(*FA3_MODULES).flash_attn_func
        if arrays.case.dtype == "float32":
            raise Unavailable("takes no float32")
        pairs = [e4m3_by_head(x, arrays.case.kv_heads) for x in arrays.torch]
        scales = {f"{name}_descale": scale for name, (_, scale) in zip("qkv", pairs, strict=True)}
        tensors, causal = [x for x, _ in pairs], arrays.case.causal

        def run():
            out = function(*tensors, causal=causal, **scales)
            return out[0] if isinstance(out, tuple) else out

        return tried(run)

    return Candidate("FlashAttention 3 FP8", make, precision="fp8")


def peers(preset: Preset) -> list[Candidate]:
    """The peers that qflash is compared with: those the preset names, or all."""
    if preset.framework == "jax":
        everyone = [jax_nn("cudnn", wait=False), jax_nn("xla", wait=False)]
    elif preset.kind == TRAIN:
        everyone = [torch_sdpa_train()]
    elif preset.kind in (DECODE, MIXED) and preset.device == "cuda":
        everyone = [torch_sdpa_backend("CUDNN_ATTENTION"), *decoding_peers(preset.page_sizes)]
    elif preset.kind == BACKWARD:
        everyone = [torch_sdpa_backward(backend) for backend in SDPA_BACKENDS]
    elif preset.device == "cuda":
        others = [flash_attn("FlashAttention 2", "flash_attn"), flash_attn_3(), flash_attn_3_fp8()]
        everyone = [torch_sdpa(), *map(torch_sdpa_backend, SDPA_BACKENDS), torch_naive(), *others]
        if preset.peers is not None:  # only by name: they need a minute to compile, or a file
            everyone += [torch_compiled(), triton_tutorial()]
    else:
        everyone = [torch_sdpa(), torch_naive(), jax_nn()]
    if preset.peers is None:  # all that compute in the arrays' own dtype
        return [peer for peer in everyone if peer.precision is None]
    return [peer for peer in everyone if peer.name in preset.peers]


def _front(preset: Preset) -> Callable[[str], Candidate]:
    """The front end through which a preset calls kernels."""
    if preset.framework == "jax":
        return qflash_jax
    if preset.kind == TRAIN:
        return qflash_torch_train
    if preset.kind == BACKWARD:
        return qflash_backward
    return qflash_torch if preset.device == "cuda" or machine.version("torch") else qflash_numpy


def _front_of(variant: dispatch.Variant) -> str:
    """Kernels for many rows quantize q in a separate pass, without which they can be timed."""
    return "kept, decoded" if variant.kv == "kept" and variant.kernel.few_rows else variant.kv


def candidates(preset: Preset) -> list[Candidate]:
    """All candidates of a preset, qflash first."""
    sizes = preset.page_sizes
    fronts = {
        "arrays": (_front(preset),),
        "quantized": (qflash_quantized,),
        "kept": (qflash_kv, qflash_alone),
        "kept, decoded": (qflash_kv,),
        "pages": tuple(partial(qflash_pages, page_size=size) for size in sizes),
        "pages_int8": tuple(partial(qflash_pages, page_size=size) for size in sizes[:1]),
    }
    ours = [front(name) for name in preset.kernels for front in fronts[_front_of(dispatch.VARIANTS[name])]]
    if preset.rope:
        ours += map(qflash_rope, preset.kernels)
    return [*ours, *peers(preset)]
