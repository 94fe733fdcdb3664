"""Why a kernel cannot serve a Spec, or does not store its dS, for conditions that columns of its row cannot express."""

from __future__ import annotations

from qflash.call.spec import Spec
from qflash.kernels.kernel import HALVES


def sixteen_bit_tensor_cores(spec: Spec) -> list[str]:
    """Why the tensor cores of a GPU cannot multiply this dtype."""
    if spec.dtype == "bfloat16" and spec.arch < 80:
        return [f"bfloat16 needs the tensor cores of compute capability 8.0, this GPU has {spec.arch / 10}"]
    return []


def small_head_dim(spec: Spec) -> str:
    """A score takes the same number of bytes at any head_dim, but is cheaper to recompute at a small one."""
    return "" if spec.head_dim > 64 else "at this head_dim that is faster than to keep dS"


def small_blocks(spec: Spec) -> str:
    """fa_mma_bwd's blocks must hold whole tiles of dS."""
    return "shared memory holds 32 keys at this head_dim" if spec.arch < 80 and spec.head_dim > 192 else ""


def copy_engine(spec: Spec) -> list[str]:
    """Why TMA, Hopper's copy engine, cannot load rows of this head_dim."""
    if spec.head_dim % 8:
        return [f"head_dim is {spec.head_dim}; the copy engine takes multiples of 8, rows of whole 16 bytes"]
    return []


def one_lesson(spec: Spec) -> list[str]:
    """What the rungs that never run by default do not support, so that each of them teaches one thing."""
    found = []
    if spec.rope is not None:
        found.append("takes no rope; fa and fa_mma do")
    if spec.packed:
        found.append("takes no packed arrays (attention_varlen); fa and fa_mma do")
    return found


def wmma(spec: Spec) -> list[str]:
    """What fa_tc does not support: the same as other rungs, and rows that are not multiples of 16 bytes."""
    found = sixteen_bit_tensor_cores(spec) + one_lesson(spec)
    if spec.head_dim % 8:
        found.append(f"head_dim is {spec.head_dim}; fa_tc takes multiples of 8, rows of whole 16 bytes")
    return found


def gelu_alone(spec: Spec) -> list[str]:
    """What the WMMA rung does not support."""
    found = sixteen_bit_tensor_cores(spec)
    if not spec.activation.startswith("gelu"):
        found.append(f"fuses GeLU alone, activation is {spec.activation or None!r}; gemm_mma takes every activation")
    return found


def sums_alone(spec: Spec) -> list[str]:
    """int32 results are the accumulators, without an epilogue."""
    return ["gives int32 without an activation alone"] if spec.dtype == "int32" and spec.activation else []


def linear_in_triton(spec: Spec) -> list[str]:
    """What triton_linear does not support."""
    if spec.precision == "native" and spec.dtype not in HALVES:
        return [f"multiplies float16, bfloat16 and int8, not {spec.dtype}"]
    return sums_alone(spec)


def gemm_by_copy_engine(spec: Spec) -> list[str]:
    """What Hopper's GEMM does not support: float32, and integers that its tensor cores cannot read."""
    if spec.precision == "native" and spec.dtype not in HALVES:
        return [f"multiplies float16, bfloat16 and int8, not {spec.dtype}"]
    if spec.precision == "int8" and spec.layout == "n":
        return ["takes int8 weights that are contiguous along k (the transpose of [N, K]), not along n"]
    if spec.dtype == "int32" and spec.activation:
        return [f"int32 are the sums alone, without {spec.activation}"]
    return []


def decoding(spec: Spec) -> list[str]:
    """What the decode kernels do not support."""
    return ["takes no packed arrays (attention_varlen)"] if spec.packed else []


def whole_blocks_of_int8(spec: Spec) -> list[str]:
    """Why int8 pages cannot hold heads of this head_dim."""
    if spec.kv == "pages_int8" and spec.head_dim % 16:
        return [f"head_dim is {spec.head_dim}; int8 pages take multiples of 16, whole blocks of the Hadamard matrix"]
    return []


def scales_in_runs(spec: Spec) -> list[str]:
    """Why the scales of int8 pages cannot be copied 16 bytes at a time."""
    if spec.odd_scales:
        return ["takes scales of int8 pages whose pages and heads are whole 16 bytes apart"]
    return []


def decoding_anywhere(spec: Spec) -> list[str]:
    found = decoding(spec) + sixteen_bit_tensor_cores(spec) + scales_in_runs(spec)
    if spec.head_dim % 8:
        found.append(f"head_dim is {spec.head_dim}; decode takes multiples of 8, rows of whole 16 bytes")
    return found or whole_blocks_of_int8(spec)


def decoding_by_copy_engine(spec: Spec) -> list[str]:
    found = decoding(spec) + copy_engine(spec) + scales_in_runs(spec)
    if spec.odd_pages:
        found.append("takes pools whose pages, heads and tokens are whole 16 bytes apart, as the copy engine does")
    return found or whole_blocks_of_int8(spec)


def decoding_in_triton(spec: Spec) -> list[str]:
    found = decoding(spec)
    if spec.rope is not None and spec.kv == "arrays":
        found.append("takes no rope with arrays, whose keys it would have to rotate at every step; with pages it does")
    return found
