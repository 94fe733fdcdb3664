"""KERNELS: one row per kernel, and the pure functions that choose among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from qflash.call.spec import ACTIVATIONS, DTYPES, MOST_DECODE_ROWS, PRECISIONS, Spec
from qflash.errors import NoKernelError

# Head dims that most kernels of attention are compiled for; each serves every smaller one down to the next.
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one kernel can do, and every fact that wiring it needs. The first usable row of its operation wins."""

    name: str
    device: str  # "cpu" or "cuda"
    summary: str
    op: str = "attention"
    backend: str = ""  # the module of qflash/backends that loads it; "": that of its device
    page: str | None = None  # docs/kernels/<page>.md describes it; None: the page of its own name
    dtypes: tuple[str, ...] = DTYPES
    precisions: tuple[str, ...] = ("native",)
    kvs: tuple[str, ...] = ("arrays",)  # what may stand in the places of k and v, of KV_KINDS
    kept_precisions: tuple[str, ...] = ()  # those of QuantizedKV, where they are not `precisions`
    min_arch: int = 0
    later_arches: bool = True  # False: made of instructions that GPUs after min_arch lack again
    automatic: bool = True  # False: runs only when asked for by name
    few_rows: bool = False  # serves only Spec.few_rows
    sinks: bool = False  # serves Spec.sinks, too
    batch_invariant: bool = False  # serves Spec.batch_invariant, too
    # False: NaN and infinity in v reach, in their channel, every row of a tile of which some row sees them
    hides_masked_nonfinite_v: bool = True
    also: Callable[[Spec], list[str]] | None = None  # further reasons it cannot serve a spec
    # CUDA: what a library is compiled for, a define each. head_dims: (): it takes any at run time.
    head_dims: tuple[int, ...] = ()
    per_dtype: bool = True
    per_arch: bool = True
    per_precision: bool = False
    per_kv: bool = False
    shared_kvs: tuple[tuple[str, str], ...] = ()  # with per_kv: (kind, the kind whose library serves it as well)
    per_batch_invariance: bool = False  # a library for Spec.batch_invariant, and one for the others
    per_activation: bool = False  # of linear: a library for each of ACTIVATIONS
    per_scores: bool = False  # a library for Spec.plain_scores, and one for the others
    parts: int = 1  # objects of a library that are compiled side by side
    # Backward: why dS of a spec is not kept for dQ even where memory allows it (ops/backward_memory.py); "": it is.
    # None: the kernel keeps none.
    drops_ds: Callable[[Spec], str] | None = None
    # Quantized: (precision, kind of KV) to (head_dim, keys) by rising head_dim. Up to that head_dim, a problem of fewer
    # keys is usually faster without quantization, None: any problem is. What `explain` notes; bench rows say so.
    pays_from: tuple[tuple[tuple[str, str], tuple[tuple[int, int | None], ...]], ...] = ()

    def __post_init__(self) -> None:
        if not self.backend:
            object.__setattr__(self, "backend", self.device)

    @property
    def precision(self) -> str:
        """The one it computes in, or the first."""
        return self.precisions[0]

    def precisions_of(self, kv: str) -> tuple[str, ...]:
        """Those that it computes in with such k and v. A QuantizedKV has one of its own."""
        return self.kept_precisions if kv == "kept" and self.kept_precisions else self.precisions


def _sixteen_bit_tensor_cores(spec: Spec) -> list[str]:
    """Why the tensor cores of a GPU cannot multiply this dtype."""
    if spec.dtype == "bfloat16" and spec.arch < 80:
        return [f"bfloat16 needs the tensor cores of compute capability 8.0, this GPU has {spec.arch / 10}"]
    return []


def _small_head_dim(spec: Spec) -> str:
    """A score costs as many bytes at any head_dim, and less to compute again at a small one."""
    return "" if spec.head_dim > 64 else "at this head_dim that is faster than to keep dS"


def _small_blocks(spec: Spec) -> str:
    """fa_mma_bwd's blocks must hold whole tiles of dS."""
    return "shared memory holds 32 keys at this head_dim" if spec.arch < 80 and spec.head_dim > 192 else ""


def _copy_engine(spec: Spec) -> list[str]:
    """Why Hopper's copy engine cannot fetch rows of this head_dim."""
    if spec.head_dim % 8:
        return [f"head_dim is {spec.head_dim}; the copy engine takes multiples of 8, rows of whole 16 bytes"]
    return []


def _one_lesson(spec: Spec) -> list[str]:
    """What the rungs that nobody gets by default leave out, so that each of them teaches one thing."""
    found = []
    if spec.rope is not None:
        found.append("takes no rope; fa and fa_mma do")
    if spec.packed:
        found.append("takes no packed arrays (attention_varlen); fa and fa_mma do")
    return found


def _wmma(spec: Spec) -> list[str]:
    """What fa_tc leaves out: as the other rungs, and rows that are no whole chunks of 16 bytes."""
    found = _sixteen_bit_tensor_cores(spec) + _one_lesson(spec)
    if spec.head_dim % 8:
        found.append(f"head_dim is {spec.head_dim}; fa_tc takes multiples of 8, rows of whole 16 bytes")
    return found


def _gelu_alone(spec: Spec) -> list[str]:
    """What the rung of WMMA leaves out."""
    found = _sixteen_bit_tensor_cores(spec)
    if not spec.activation.startswith("gelu"):
        found.append(f"fuses GeLU alone, activation is {spec.activation or None!r}; gemm_mma takes every activation")
    return found


def _sums_alone(spec: Spec) -> list[str]:
    """int32 results are sums, and nothing follows them."""
    return ["gives int32 without an activation alone"] if spec.dtype == "int32" and spec.activation else []


def _linear_in_triton(spec: Spec) -> list[str]:
    """What triton_linear leaves out."""
    if spec.precision == "native" and spec.dtype not in _HALVES:
        return [f"multiplies float16, bfloat16 and int8, not {spec.dtype}"]
    return _sums_alone(spec)


def _gemm_by_copy_engine(spec: Spec) -> list[str]:
    """What Hopper's GEMM leaves to others: float32, and integers that its tensor cores cannot read."""
    if spec.precision == "native" and spec.dtype not in _HALVES:
        return [f"multiplies float16, bfloat16 and int8, not {spec.dtype}"]
    if spec.precision == "int8" and spec.layout == "n":
        return ["takes int8 weights that are contiguous along k (the transpose of [N, K]), not along n"]
    if spec.dtype == "int32" and spec.activation:
        return [f"int32 are the sums alone, without {spec.activation}"]
    return []


def _decoding(spec: Spec) -> list[str]:
    """What the decode kernels leave out."""
    return ["takes no packed arrays (attention_varlen)"] if spec.packed else []


def _whole_blocks_of_int8(spec: Spec) -> list[str]:
    """Why int8 pages cannot hold heads of this head_dim."""
    if spec.kv == "pages_int8" and spec.head_dim % 16:
        return [f"head_dim is {spec.head_dim}; int8 pages take multiples of 16, whole blocks of the Hadamard matrix"]
    return []


def _decoding_anywhere(spec: Spec) -> list[str]:
    found = _decoding(spec) + _sixteen_bit_tensor_cores(spec)
    if spec.head_dim % 8:
        found.append(f"head_dim is {spec.head_dim}; decode takes multiples of 8, rows of whole 16 bytes")
    return found or _whole_blocks_of_int8(spec)


def _decoding_by_copy_engine(spec: Spec) -> list[str]:
    return _decoding(spec) + _copy_engine(spec) or _whole_blocks_of_int8(spec)


def _decoding_in_triton(spec: Spec) -> list[str]:
    found = _decoding(spec)
    if spec.rope is not None and spec.kv == "arrays":
        found.append("takes no rope with arrays, whose keys it would have to rotate at every step; with pages it does")
    return found


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="cpu",
        device="cpu",
        summary="tiled online softmax on all cores, vectorised for the machine it finds",
        kvs=("arrays", "pages", "pages_int8"),
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="cpu_int8",
        device="cpu",
        summary="INT8 QK^T with smoothed K and row-group scales, PV in 16 bits or better; Quantized arrays as floats",
        precisions=("int8",),
        kvs=("arrays", "quantized"),
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="sm90_decode",
        device="cuda",
        summary="few queries against a long cache for Hopper: keys split over all blocks, tiles by TMA, one launch",
        page="decode",
        dtypes=_HALVES,
        min_arch=90,
        later_arches=False,
        few_rows=True,
        also=_decoding_by_copy_engine,
        kvs=("arrays", "kept", "pages", "pages_int8"),
        kept_precisions=("int8",),
        per_kv=True,
        head_dims=(64, 128, 192, 256),
        sinks=True,
        batch_invariant=True,
        per_batch_invariance=True,
    ),
    Kernel(
        name="decode",
        device="cuda",
        summary="few queries against a long cache: keys split over all blocks, warps that copy their own tiles, one "
        "launch",
        dtypes=_HALVES,
        kvs=("arrays", "kept", "pages", "pages_int8"),
        kept_precisions=("int8",),
        min_arch=75,
        few_rows=True,
        also=_decoding_anywhere,
        head_dims=(64, 128, 192, 256),
        per_kv=True,
        sinks=True,
        batch_invariant=True,
        per_batch_invariance=True,
    ),
    Kernel(
        name="sm90_int8",
        device="cuda",
        summary="INT8 QK^T for Hopper: one pass rotates, smooths and quantizes q and k, products by wgmma, PV in 16 "
        "bits or E4M3",
        dtypes=_HALVES,
        precisions=("int8", "int8_fp8"),
        kvs=("arrays", "kept"),
        min_arch=90,
        later_arches=False,
        also=_copy_engine,
        head_dims=(64, 128, 256),
        per_precision=True,
        per_scores=True,
        parts=3,
        pays_from=(  # preset sm90_int8, against sm90_fwd
            (("int8", "arrays"), ((64, None), (256, 8192))),
            (("int8_fp8", "arrays"), ((64, None), (128, 16384), (256, 8192))),
            (("int8", "kept"), ((64, None), (256, 4096))),
            (("int8_fp8", "kept"), ((64, None), (256, 4096))),
        ),
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="fa_int8",
        device="cuda",
        summary="INT8 QK^T on tensor cores, smoothed K, row-group scales, PV in 16 bits; quantizes q and k first, "
        "unless they are Quantized, with V in 16 bits or INT8",
        dtypes=_HALVES,
        precisions=("int8",),
        kvs=("arrays", "quantized"),
        min_arch=75,
        also=_sixteen_bit_tensor_cores,
        head_dims=HEAD_DIMS,
        per_kv=True,
        pays_from=((("int8", "arrays"), ((64, None), (256, 4096))),),  # preset ladder, against fa_mma
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="sm90_fwd",
        device="cuda",
        summary="FlashAttention for Hopper: tiles by TMA, products by wgmma, softmax under them, warps with roles",
        dtypes=_HALVES,
        kvs=("arrays", "pages", "pages_int8"),
        min_arch=90,
        later_arches=False,
        also=_copy_engine,
        head_dims=(64, 96, 112, 128, 192, 256),
        per_kv=True,
        shared_kvs=(("pages_int8", "pages"),),
        per_scores=True,
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="fa_mma",
        device="cuda",
        summary="FlashAttention on tensor cores: mma.sync fragments, swizzled tiles, async copies, P in registers",
        dtypes=_HALVES,
        kvs=("arrays", "pages", "pages_int8"),
        min_arch=75,
        also=_sixteen_bit_tensor_cores,
        head_dims=HEAD_DIMS,
        sinks=True,
        batch_invariant=True,
        per_kv=True,
        shared_kvs=(("pages_int8", "pages"),),
    ),
    Kernel(
        name="fa",
        device="cuda",
        summary="FlashAttention on CUDA cores in float32: tiled, online softmax, rope as tiles are loaded",
        min_arch=75,
        head_dims=HEAD_DIMS,
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="fa_tc",
        device="cuda",
        summary="FlashAttention on tensor cores through WMMA: scores and weights pass through shared memory; no rope "
        "or packed arrays",
        dtypes=_HALVES,
        min_arch=75,
        automatic=False,
        hides_masked_nonfinite_v=False,
        also=_wmma,
        head_dims=HEAD_DIMS,
    ),
    Kernel(
        name="fa_warps",
        device="cuda",
        summary="fa with whole K and V tiles copied asynchronously: warps meet only where a tile changes hands; no "
        "rope or packed arrays",
        min_arch=75,
        automatic=False,
        also=_one_lesson,
        head_dims=HEAD_DIMS,
    ),
    Kernel(
        name="unfused",
        device="cuda",
        summary="three kernels, QK^T, softmax, PV; materialises the scores: memory grows with Tq x Tk; no rope or "
        "packed arrays",
        min_arch=75,
        automatic=False,
        also=_one_lesson,
        per_arch=False,
    ),
    Kernel(
        name="triton_fwd",
        device="cuda",
        summary="FlashAttention in Triton: the tiles of fa_mma, their layouts and copies left to a compiler",
        backend="triton",
        page="triton",
        min_arch=80,
        automatic=False,
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="triton_int8",
        device="cuda",
        summary="INT8 QK^T in Triton: the integers of fa_int8, made by passes of their own, PV in 16 bits",
        dtypes=_HALVES,
        precisions=("int8",),
        backend="triton",
        page="triton",
        min_arch=80,
        automatic=False,
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="triton_decode",
        device="cuda",
        summary="few queries against a long cache in Triton: keys split over programs, parts merged in a fixed order",
        dtypes=_HALVES,
        kvs=("arrays", "pages"),
        backend="triton",
        page="triton",
        min_arch=80,
        automatic=False,
        few_rows=True,
        also=_decoding_in_triton,
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="cpu_bwd",
        device="cpu",
        summary="gradients of cpu: weights again from lse, tile by tile, in a fixed order",
        op="attention_backward",
        page="cpu",
        sinks=True,
        batch_invariant=True,
    ),
    Kernel(
        name="sm90_bwd",
        device="cuda",
        summary="gradients for Hopper: dK and dV, and dQ, each summed in registers in a fixed order, tiles by TMA, "
        "products by wgmma",
        op="attention_backward",
        dtypes=_HALVES,
        min_arch=90,
        later_arches=False,
        also=_copy_engine,
        head_dims=(64, 96, 128, 192, 256),
        per_scores=True,
        sinks=True,
        drops_ds=_small_head_dim,
    ),
    Kernel(
        name="fa_mma_bwd",
        device="cuda",
        summary="gradients on tensor cores: mma.sync, keys stationary for dK and dV, dQ from their dS or by itself; "
        "no atomics",
        op="attention_backward",
        dtypes=_HALVES,
        min_arch=75,
        also=_sixteen_bit_tensor_cores,
        head_dims=HEAD_DIMS,
        per_scores=True,
        sinks=True,
        drops_ds=_small_blocks,
    ),
    Kernel(
        name="fa_bwd",
        device="cuda",
        summary="gradients on CUDA cores in float32: keys stationary for dK and dV, queries for dQ; no atomics",
        op="attention_backward",
        min_arch=75,
        per_arch=False,
        head_dims=HEAD_DIMS,
        sinks=True,
    ),
    Kernel(
        name="sm90_quantize",
        device="cuda",
        summary="k, and v for E4M3, as sm90_int8 wants them: rope, smoothing, Hadamard matrix, integers in one pass",
        op="quantize_kv",
        dtypes=_HALVES,
        precisions=("int8", "int8_fp8"),
        min_arch=90,
        later_arches=False,
        also=_copy_engine,
        head_dims=(64, 128, 256),
        parts=3,
    ),
    Kernel(
        name="cpu_kv_write",
        device="cpu",
        summary="new k and v into the pages of a cache on all cores: rope, mean, Hadamard matrix, scales, integers",
        op="kv_write",
        page="kv_write",
        kvs=("pages", "pages_int8"),
        also=_whole_blocks_of_int8,
    ),
    Kernel(
        name="kv_write",
        device="cuda",
        summary="new k and v into the pages of a cache: rope, mean, Hadamard matrix, scales, integers, one launch",
        op="kv_write",
        kvs=("pages", "pages_int8"),
        min_arch=75,
        also=_whole_blocks_of_int8,
    ),
    Kernel(
        name="cpu_merge",
        device="cpu",
        summary="two results of attention on different keys to one, row by row on all cores",
        op="merge",
        page="merge",
    ),
    Kernel(
        name="merge",
        device="cuda",
        summary="two results of attention on different keys to one, four channels a thread",
        op="merge",
        min_arch=75,
    ),
    Kernel(
        name="cpu_rope",
        device="cpu",
        summary="rotary embedding, and the way back, row by row on all cores",
        op="rope",
        page="rope",
    ),
    Kernel(
        name="rope",
        device="cuda",
        summary="rotary embedding, and the way back: whole pairs in a thread, tables read once for four heads",
        op="rope",
        min_arch=75,
    ),
    Kernel(
        name="triton_rope",
        device="cuda",
        summary="in Triton: whole pairs in a program, tables read once for four heads",
        op="rope",
        backend="triton",
        page="triton",
        min_arch=80,
        automatic=False,
    ),
    Kernel(
        name="cpu_softmax",
        device="cpu",
        summary="softmax over rows on all cores, vectorised for the machine it finds",
        op="softmax",
        page="reductions",
    ),
    Kernel(
        name="softmax",
        device="cuda",
        summary="rows in registers, one reduction of (max, sum) pairs by warp or block",
        op="softmax",
        page="reductions",
        min_arch=75,
    ),
    Kernel(
        name="triton_softmax",
        device="cuda",
        summary="in Triton: rows in registers, two reductions; longer rows in two walks",
        op="softmax",
        backend="triton",
        page="triton",
        min_arch=80,
        automatic=False,
    ),
    Kernel(
        name="cpu_layer_norm",
        device="cpu",
        summary="layer normalisation over rows on all cores, vectorised for the machine it finds",
        op="layer_norm",
        page="reductions",
    ),
    Kernel(
        name="layer_norm",
        device="cuda",
        summary="rows in registers, one reduction of (count, mean, deviations) by warp or block",
        op="layer_norm",
        page="reductions",
        min_arch=75,
    ),
    Kernel(
        name="cpu_cross_entropy",
        device="cpu",
        summary="cross entropy over rows on all cores, vectorised for the machine it finds",
        op="cross_entropy",
        page="reductions",
    ),
    Kernel(
        name="cross_entropy",
        device="cuda",
        summary="logits read once, one reduction of (max, sum) pairs by warp or block, totals in a fixed order",
        op="cross_entropy",
        page="reductions",
        min_arch=75,
    ),
    Kernel(
        name="cpu_softmax_bwd",
        device="cpu",
        summary="gradient of softmax over rows on all cores, from its result",
        op="softmax_backward",
        page="reductions",
    ),
    Kernel(
        name="softmax_bwd",
        device="cuda",
        summary="rows of out and dout in registers, one reduction of their product by warp or block",
        op="softmax_backward",
        page="reductions",
        min_arch=75,
    ),
    Kernel(
        name="cpu_layer_norm_bwd",
        device="cpu",
        summary="gradients of layer normalisation on all cores; sums over rows in an order that the shape fixes",
        op="layer_norm_backward",
        page="reductions",
    ),
    Kernel(
        name="layer_norm_bwd",
        device="cuda",
        summary="rows of x and dout in registers, one reduction; sums over rows in two steps, no atomics",
        op="layer_norm_backward",
        page="reductions",
        min_arch=75,
    ),
    Kernel(
        name="cpu_cross_entropy_bwd",
        device="cpu",
        summary="gradient of cross entropy on all cores, from the rows' log-sum-exp",
        op="cross_entropy_backward",
        page="reductions",
    ),
    Kernel(
        name="cross_entropy_bwd",
        device="cuda",
        summary="logits read once, gradients written once: the log-sum-exp is the forward pass's",
        op="cross_entropy_backward",
        page="reductions",
        min_arch=75,
    ),
    Kernel(
        name="cpu_linear",
        device="cpu",
        summary="product with a weight, bias, activation and residual on all cores, packed in blocks for the caches",
        op="linear",
    ),
    Kernel(
        name="cpu_int8_matmul",
        device="cpu",
        summary="INT8 product on all cores: AMX tiles, VNNI or pairs of int16, whichever the machine has",
        op="linear",
        precisions=("int8",),
        dtypes=(*DTYPES, "int32"),
    ),
    Kernel(
        name="sm90_gemm",
        device="cuda",
        summary="linear layers for Hopper: tiles by TMA for pairs of blocks, products by wgmma, bias, activation and "
        "scales under the next tile's products",
        op="linear",
        precisions=("native", "int8"),
        dtypes=(*DTYPES, "int32"),
        min_arch=90,
        later_arches=False,
        also=_gemm_by_copy_engine,
        per_precision=True,
        per_activation=True,
    ),
    Kernel(
        name="gemm_mma",
        device="cuda",
        summary="products in 16 bits on tensor cores: mma.sync, swizzled tiles of any layout, asynchronous copies",
        op="linear",
        dtypes=_HALVES,
        min_arch=75,
        also=_sixteen_bit_tensor_cores,
        per_activation=True,
    ),
    Kernel(
        name="gemm_tiled",
        device="cuda",
        summary="products in float32 on CUDA cores: tiles in shared memory, 8 x 8 sums a thread",
        op="linear",
        min_arch=75,
        per_arch=False,
        per_activation=True,
    ),
    Kernel(
        name="gelu_linear_wmma",
        device="cuda",
        summary="GeLU behind products through WMMA: opaque fragments, sums pass through shared memory; no other "
        "activation",
        op="linear",
        dtypes=_HALVES,
        min_arch=75,
        automatic=False,
        also=_gelu_alone,
        per_arch=False,
        per_activation=True,
    ),
    Kernel(
        name="int8_gemm_tc",
        device="cuda",
        summary="INT8 product on tensor cores: mma.sync, swizzled tiles, asynchronous copies",
        op="linear",
        precisions=("int8",),
        dtypes=(*DTYPES, "int32"),
        min_arch=75,
        also=_sums_alone,
        per_activation=True,
    ),
    Kernel(
        name="int8_gemm_tiled",
        device="cuda",
        summary="INT8 product on CUDA cores: tiles in shared memory, four products an instruction (dp4a)",
        op="linear",
        precisions=("int8",),
        dtypes=(*DTYPES, "int32"),
        min_arch=75,
        also=_sums_alone,
        per_activation=True,
    ),
    Kernel(
        name="triton_linear",
        device="cuda",
        summary="linear layers in Triton, 16 bits or INT8 with scales: bias, activation, residual behind the products",
        op="linear",
        dtypes=(*_HALVES, "float32", "int32"),
        precisions=("native", "int8"),
        backend="triton",
        page="triton",
        min_arch=80,
        automatic=False,
        also=_linear_in_triton,
    ),
    Kernel(
        name="cpu_linear_bwd",
        device="cpu",
        summary="gradients of cpu_linear: its products with w and x transposed; sums over rows in a fixed order",
        op="linear_backward",
        page="cpu_linear",
    ),
    Kernel(
        name="linear_bwd",
        device="cuda",
        summary="gradients of linear layers: slopes of the activation and dbias in one pass, dx and dw by the kernels "
        "of the forward pass; no atomics",
        op="linear_backward",
        min_arch=75,
    ),
    Kernel(
        name="cpu_quantize",
        device="cpu",
        summary="rope, smoothing, scales and rounding to INT8 on all cores",
        op="quantize",
        page="quantize",
    ),
    Kernel(
        name="cpu_dequantize",
        device="cpu",
        summary="INT8 and its scales back to floats on all cores",
        op="dequantize",
        page="quantize",
    ),
    Kernel(
        name="quantize",
        device="cuda",
        summary="rope, smoothing, scales and rounding to INT8 in one pass, two where a scale is shared widely",
        op="quantize",
        min_arch=75,
    ),
    Kernel(
        name="dequantize",
        device="cuda",
        summary="INT8 and its scales back to floats in one pass",
        op="dequantize",
        page="quantize",
        min_arch=75,
    ),
)

BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def kernels_of(op: str = "attention", device: str | None = None) -> tuple[Kernel, ...]:
    """The rows of one operation, on one device where that is named."""
    return tuple(kernel for kernel in KERNELS if kernel.op == op and device in (None, kernel.device))


def arch_reasons(kernel: Kernel, arch: int, whose: str = "this GPU has") -> list[str]:
    """Why `kernel` has no code for compute capability `arch`/10; empty when it has. `whose`: before the number."""
    if arch < kernel.min_arch:
        return [f"needs compute capability {kernel.min_arch / 10}, {whose} {arch / 10}"]
    if arch > kernel.min_arch and not kernel.later_arches:
        return [f"runs on compute capability {kernel.min_arch / 10} alone, {whose} {arch / 10}"]
    return []


def reasons(kernel: Kernel, spec: Spec) -> list[str]:
    """Why `kernel` cannot serve `spec`; empty when it can."""
    if kernel.op != spec.op:
        return [f"computes {kernel.op}, not {spec.op}"]
    if kernel.device != spec.device:
        elsewhere = f"runs on {kernel.device}, the arrays are on {spec.device}"
        return [elsewhere, *_reasons_there(kernel, replace(spec, device=kernel.device, arch=_NEWEST_ARCH))]
    return arch_reasons(kernel, spec.arch) + _reasons_there(kernel, spec)


# Of a GPU that is not known: what is refused there, is refused on every GPU.
_NEWEST_ARCH = 1000


def _reasons_there(kernel: Kernel, spec: Spec) -> list[str]:
    """Why `kernel` cannot serve `spec` on a device that it has code for."""
    found = []
    if spec.dtype not in kernel.dtypes:
        found.append(f"takes {', '.join(kernel.dtypes)}, not {spec.dtype}")
    if spec.precision not in kernel.precisions_of(spec.kv):
        taken = " or ".join(map(_precision_word, kernel.precisions_of(spec.kv)))
        of_kv = "qflash.QuantizedKV of " if spec.kv == "kept" and kernel.kept_precisions else ""
        found.append(f"takes {of_kv}precision {taken}, not {_precision_word(spec.precision)}")
    if spec.kv not in kernel.kvs:
        taken = " or ".join(_KV_WORDS[kv] for kv in kernel.kvs)
        found.append(f"takes {taken} for k and v, not {_KV_WORDS[spec.kv]}")
    if kernel.few_rows and not spec.few_rows:
        found.append(f"takes up to {MOST_DECODE_ROWS} rows of queries a KV head (Tq times the heads that share it)")
    if spec.sinks and not kernel.sinks:
        found.append("takes no sinks")
    if spec.batch_invariant and not kernel.batch_invariant:
        found.append("does not promise the same bits in every batch (batch_invariant)")
    if kernel.also is not None:
        found += kernel.also(spec)
    return found


def _precision_word(precision: str) -> str:
    """A Spec's precision as `attention` takes it."""
    return "None" if precision == "native" else f'"{precision}"'


_KV_WORDS = {
    "arrays": "arrays", "quantized": "qflash.Quantized", "kept": "qflash.QuantizedKV",
    "pages": "qflash.PagedKV", "pages_int8": "qflash.PagedKV of int8",
}  # fmt: skip


@lru_cache(maxsize=4096)
def choose(spec: Spec, name: str | None = None) -> Kernel:
    """The kernel that serves `spec`: the one called `name`, or the first usable row of its operation."""
    if name is not None:
        kernel = BY_NAME.get(name)
        if kernel is None or kernel.op != spec.op:
            allowed = "".join(f", {other.name!r}" for other in kernels_of(spec.op))
            raise ValueError(f"kernel is {name!r}; allowed: None{allowed}")
        why_not = reasons(kernel, spec)
        if why_not:
            raise NoKernelError(
                f"kernel {name!r} cannot serve this problem: {'; '.join(why_not)}\n{table(verdicts(spec))}"
            )
        return kernel
    for kernel in kernels_of(spec.op):
        if kernel.automatic and not reasons(kernel, spec):
            return kernel
    problem = "problem" if spec.op == "attention" else spec.op
    raise NoKernelError(f"no kernel serves this {problem}\n{table(verdicts(spec))}")


def backward_of(spec: Spec) -> Kernel | None:
    """The kernel that computes the gradients of a call that `spec` describes; None where there is none."""
    try:
        return choose(replace(spec, op="attention_backward"))
    except NoKernelError:
        return None


def verdicts(spec: Spec, asked: str | None = None) -> list[tuple[str, str, str]]:
    """(kernel, verdict, why) for every kernel of the operation: what `explain` shows. `asked`: the one asked for."""
    chosen = asked
    why_first = "comes first" if asked is None else "was asked for"
    result = []
    for kernel in kernels_of(spec.op):
        why_not = reasons(kernel, spec)
        if why_not:
            result.append((kernel.name, "no", "; ".join(why_not)))
        elif kernel.name == asked:
            result.append((kernel.name, "runs", kernel.summary))
        elif not kernel.automatic:
            result.append((kernel.name, "on request", kernel.summary))
        elif chosen is None:
            chosen = kernel.name
            result.append((kernel.name, "runs", kernel.summary))
        else:
            result.append((kernel.name, "could", f"{chosen} {why_first}; {kernel.summary}"))
    return result


def notes(spec: Spec, name: str | None, tokens: int) -> list[str]:
    """What one should know about kernel `name` serving `spec`: where NaN goes, where it is not worth its precision.

    tokens: queries or keys, whichever are fewer: few of either leave little work to make up for quantizing.
    """
    if name is None:
        return []
    if spec.window and not BY_NAME[name].hides_masked_nonfinite_v:
        return [f"NaN or infinity in v may reach rows that {name} masks it from (docs/numerics.md)"]
    for head_dim, least in dict(BY_NAME[name].pays_from).get((spec.precision, spec.kv), ()):
        if spec.head_dim <= head_dim:
            if least is not None and tokens >= least:
                return []
            where = "at this head_dim" if least is None else f"below {least} queries and keys"
            plain = choose(replace(spec, precision=PRECISIONS[0], kv="arrays")).name
            if spec.kv == "kept":  # k and v are what they are
                return [f"{where} {plain} on k and v of {spec.dtype} is usually faster"]
            return [f"{where} {plain} is usually faster (quantizing is not paid back); precision=None selects it"]
    return []


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel in one of its precisions, on one kind of k and v: what is tested, measured and profiled by itself."""

    name: str  # the kernel's, with endings for what is not its first: sm90_int8_fp8_kv
    kernel: Kernel
    precision: str
    kv: str

    def spec(self, arch: int, dtype: str, head_dim: int = 0) -> Spec:
        """The plainest Spec that it serves."""
        kernel = self.kernel
        plain = Spec(
            *(kernel.device, arch, dtype, head_dim, self.precision),
            op=kernel.op,
            kv=self.kv,
            few_rows=kernel.few_rows,
        )
        if not kernel.per_activation:
            return plain
        specs = (replace(plain, activation=activation) for activation in ACTIVATIONS)
        return next((spec for spec in specs if not reasons(kernel, spec)), plain)

    @property
    def device(self) -> str:
        return self.kernel.device

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.kernel.dtypes

    @property
    def contract(self) -> str:
        """What results are held against (docs/numerics.md): a precision, or "int8_pages"."""
        return "int8_pages" if self.kv == "pages_int8" else self.precision


_KV_ENDINGS = {"arrays": "", "quantized": "_quantized", "kept": "_kv", "pages": "_pages", "pages_int8": "_pages_int8"}


def _variants() -> dict[str, Variant]:
    found = {}
    for kernel in KERNELS:
        for kv in kernel.kvs:
            for precision in kernel.precisions_of(kv):
                ending = precision.removeprefix(kernel.precisions_of(kv)[0]).removeprefix("_")
                name = kernel.name + (f"_{ending}" if ending else "") + _KV_ENDINGS[kv]
                found[name] = Variant(name, kernel, precision, kv)
    return found


VARIANTS = _variants()


def variants_of(op: str = "attention", device: str | None = None, kv: str = "arrays") -> tuple[Variant, ...]:
    """The variants of the kernels of one operation, on one device where that is named, that take such k and v."""
    kernels = kernels_of(op, device)
    return tuple(variant for variant in VARIANTS.values() if variant.kernel in kernels and variant.kv == kv)


def table(lines: list[tuple[str, str, str]]) -> str:
    """`verdicts` as aligned text."""
    if not lines:
        return "  (it has no kernel in this version)"
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "\n".join(f"  {name:<{widths[0]}}  {verdict:<{widths[1]}}  {why}" for name, verdict, why in lines)
