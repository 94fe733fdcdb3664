"""quantize_kv: K and V in the form that Hopper's INT8 kernels read, quantized once for many attention calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from qflash.call.array import Array, check_device, check_dtype, check_float, check_shape, dtype_code, dtype_name
from qflash.call.op import Op, Operand, Plan, Result
from qflash.call.spec import KV_KINDS, PRECISIONS, spec_of
from qflash.call.words import check_int, check_kernel, check_word
from qflash.frontends.choose import frontend_of
from qflash.ops.problem import MAX_HEAD_DIM
from qflash.ops.quantization import ROUNDINGS, check_rope, shape_of, tables_of
from qflash.ops.run import run
from qflash.rotary import Rope
from qflash.typing import ArrayT, ArrayT_co, FrameworkArray, Integer, Lengths, Precision, Rounding

KV_PRECISIONS = PRECISIONS[1:]
_BLOCK, _KEY_GROUP, _VALUE_TILE = (
    16,
    64,
    128,
)  # channels of a Hadamard matrix, keys per scale, keys per exponent of V


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedKV(Generic[ArrayT_co]):
    """K and V quantized for attention on Hopper. Returned by `quantize_kv`; pass it as `attention(q, kv)`.

    Args:
        k: int8 `[B, Tk, Hkv, ceil(D / 16) · 16]`, smoothed, then multiplied by a Hadamard matrix in every 16 channels.
        k_scale: float32 `[B, Hkv, ceil(Tk / 64)]`.
        k_mean: float32 `[B, Hkv, D]`, the mean that smoothing subtracted.
        k_nonfinite: int32 `[B, Hkv]`, the number of nonfinite keys.
        v: with precision "int8", the 16-bit array itself. With "int8_fp8", E4M3 bytes (uint8, which every framework can
            slice, concatenate and store; `v.view(torch.float8_e4m3fn)` reads them), transposed to
            `[B, Hkv, D, Tk rounded up to 128]`, with the keys permuted in every 16.
        v_scale: float32 `[B, Hkv]`. This and the following three are None with precision "int8".
        v_exponents: float32 `[B, Hkv, ceil(Tk / 128)]`, integers.
        v_nonfinite: int32 `[B, Hkv]`, the number of nonfinite values.
        v_mean: float32 `[B, Hkv, D]`, the mean that was subtracted from all values and is added back to rows of the
            output: v ~ byte · v_scale · 2^v_exponents + v_mean.
        lens: int32 `[B]`, the number of valid keys of each sequence, or None.
        dtype: the dtype of the original arrays.

    docs/kernels/sm90_quantize.md defines every step.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> kv = qflash.QuantizedKV(  # of parts that were stored
        ...     k=np.zeros((1, 100, 2, 64), np.int8),
        ...     k_scale=np.ones((1, 2, 2), np.float32),
        ...     k_mean=np.zeros((1, 2, 64), np.float32),
        ...     k_nonfinite=np.zeros((1, 2), np.int32),
        ...     v=np.zeros((1, 100, 2, 64), np.float16),
        ...     dtype="float16",
        ... )
        >>> kv.length, kv.head_dim, kv.precision
        (100, 64, 'int8')
    """

    k: ArrayT_co
    k_scale: ArrayT_co
    k_mean: ArrayT_co
    k_nonfinite: ArrayT_co
    v: ArrayT_co
    v_scale: ArrayT_co | None = None
    v_exponents: ArrayT_co | None = None
    v_nonfinite: ArrayT_co | None = None
    v_mean: ArrayT_co | None = None
    lens: ArrayT_co | None = None
    dtype: str = "bfloat16"
    precision: Precision = "int8"

    def __post_init__(self) -> None:
        # JAX must have this class registered before jit sees an instance, possibly before the first call.
        if type(self.k).__module__.partition(".")[0] in ("jax", "jaxlib"):
            import qflash.frontends.jax  # noqa: F401

    @property
    def length(self) -> int:
        """Tk, padding included."""
        length: int = self.k.shape[1]
        return length

    @property
    def head_dim(self) -> int:
        """D of the original k and v."""
        head_dim: int = self.k_mean.shape[-1]
        return head_dim


def quantize_kv(
    k: ArrayT,
    v: FrameworkArray,
    *,
    precision: Precision = "int8",
    rope: Rope | None = None,
    lens: Lengths | None = None,
    rounding: Rounding = "nearest",
    seed: Integer = 0,
    kernel: str | None = None,
) -> QuantizedKV[ArrayT]:
    """Quantize k, and for "int8_fp8" v, in one pass for `attention(q, kv)`. PyTorch and JAX arrays on Hopper.

    Args:
        k: `[B, Tk, Hkv, D]`, float16 or bfloat16, D a multiple of 8.
        v: the same for values.
        precision: "int8" leaves v unchanged, "int8_fp8" converts it to E4M3.
        rope: rotates k; key j is at position j, or at `rope.positions_k`. The same Rope may be passed to `attention`,
            which rotates q with it.
        lens: int32 `[B]`, the number of valid keys of each sequence. `attention` uses it as kv_lens unless it is given
            others, which may not exceed these.
        rounding, seed: for k, as in `quantize`.
        kernel: name of the kernel that must be used.

    Returns:
        A `QuantizedKV`. Forward only.

    Example:
        >>> import numpy as np
        >>> import qflash
        >>> k = np.zeros((1, 1024, 8, 128), np.float16)
        >>> try:  # with tensors on a Hopper GPU: attention(q, quantize_kv(k, v))
        ...     kv = qflash.quantize_kv(k, k)
        ... except qflash.NoKernelError as error:
        ...     print(str(error))
        no kernel serves this quantize_kv
          sm90_quantize  no  runs on cuda, the arrays are on cpu
    """
    cos, sin, _, positions, interleaved = tables_of(rope)
    if lens is not None:  # once, for all calls that take kv
        lens = frontend_of(type(k), "k").as_index("lens", lens, k)
    words = (precision, rounding, seed, interleaved, kernel)
    k8, k_scale, k_mean, k_nonfinite, *of_v = run(QUANTIZE_KV, (k, v, lens, cos, sin, positions), words)
    v8, v_scale, v_exponents, v_nonfinite, v_mean = of_v or (v, None, None, None, None)
    dtype = dtype_name("k", k.dtype)
    return QuantizedKV(
        k8,
        k_scale,
        k_mean,
        k_nonfinite,
        v8,
        v_scale,
        v_exponents,
        v_nonfinite,
        v_mean,
        lens=lens,
        dtype=dtype,
        precision=precision,
    )


def results_of(
    batch: int, length: int, heads: int, head_dim: int, precision: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of all outputs of quantize_kv, by the names of QuantizedKV's fields."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "k": ("int8", (batch, length, heads, _up(head_dim, _BLOCK))),
        "k_scale": ("float32", (batch, heads, _parts(length, _KEY_GROUP))),
        "k_mean": ("float32", (batch, heads, head_dim)),
        "k_nonfinite": ("int32", (batch, heads)),
    }
    if precision == "int8_fp8":
        shapes |= {
            "v": ("uint8", (batch, heads, head_dim, _up(length, _VALUE_TILE))),
            "v_scale": ("float32", (batch, heads)),
            "v_exponents": ("float32", (batch, heads, _parts(length, _VALUE_TILE))),
            "v_nonfinite": ("int32", (batch, heads)),
            "v_mean": ("float32", (batch, heads, head_dim)),
        }
    return shapes


# The field of each part of a QuantizedKV in a struct that has a QfKv.
KV_FIELDS = {
    "k": "kv.k.data", "k_scale": "kv.k_scales.scale", "k_mean": "kv.k_mean", "k_nonfinite": "kv.k_nonfinite",
    "v": "kv.v.data", "v_scale": "kv.v_scales.scale", "v_exponents": "kv.v_exponents", "v_nonfinite": "kv.v_nonfinite",
    "v_mean": "kv.v_mean",
}  # fmt: skip


def kept_fields(
    batch: int, length: int, heads: int, head_dim: int, precision: str, dtype: str
) -> tuple[tuple[str, int], ...]:
    """The other fields of its QfKv: kind, dtypes and strides."""
    width, groups = _up(head_dim, _BLOCK), _parts(length, _KEY_GROUP)
    return (
        ("kv.kind", KV_KINDS.index("kept")),
        ("kv.k_dtype", dtype_code("int8")),
        ("kv.v_dtype", dtype_code("e4m3" if precision == "int8_fp8" else dtype)),
        ("kv.k.stride_b", length * heads * width),
        ("kv.k.stride_t", heads * width),
        ("kv.k.stride_h", width),
        ("kv.k_scales.stride_b", heads * groups),
        ("kv.k_scales.stride_h", groups),
        ("kv.k_scales.group", _KEY_GROUP),
    )


def _parts(length: int, size: int) -> int:
    return (length + size - 1) // size


def _up(length: int, size: int) -> int:
    return _parts(length, size) * size


def _plan(
    k: Array,
    v: Array | None,
    lens: Array | None,
    cos: Array | None,
    sin: Array | None,
    positions: Array | None,
    precision: Any,
    rounding: Any,
    seed: Any,
    interleaved: Any,
    kernel: Any,
) -> Plan:
    check_float("k", k)
    if len(k.shape) != 4:
        raise ValueError(f"k has shape {list(k.shape)}; allowed: rank 4, [batch, length, heads, head_dim]")
    shape = shape_of("k", k)
    if shape.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"k has head_dim {shape.head_dim}; allowed: 1 to {MAX_HEAD_DIM}")
    if v is None:
        raise TypeError("v is None; allowed: an array like k")
    check_dtype("v", v, k.dtype)
    check_shape("v", v, k.shape)
    check_device("v", v, "k", k.device)
    check_word("precision", precision, KV_PRECISIONS)
    strides = shape.strides_of("k", k)
    operands = [Operand("k", "k.data", contiguous=strides is None)]
    fields = [*(strides or shape.strides("k"))]
    if precision == "int8_fp8":  # otherwise the kernel does not read it
        strides = shape.strides_of("v", v)
        operands.append(Operand("v", "v.data", contiguous=strides is None))
        fields += strides or shape.strides("v")
    if lens is not None:
        check_dtype("lens", lens, "int32")
        check_shape("lens", lens, (shape.batch,))
        check_device("lens", lens, "k", k.device)
        operands.append(Operand("lens", "kv_lens", contiguous=True))
    rope_fields, rope_operands = check_rope(shape, k.device, cos, sin, positions, interleaved, "k")
    sizes = (shape.batch, shape.length, shape.heads, shape.head_dim)
    wanted = results_of(*sizes, precision)
    return Plan(
        for_spec=spec_of("quantize_kv", k.device, k.dtype, head_dim=int(shape.head_dim), precision=precision),
        device=k.device,
        kernel=check_kernel(kernel),
        struct="QfQuantizeKvParams",
        fields=(
            ("dtype", dtype_code(k.dtype)),
            ("precision", PRECISIONS.index(precision)),
            ("batch", shape.batch),
            ("k_len", shape.length),
            ("kv_heads", shape.heads),
            ("head_dim", shape.head_dim),
            ("rounding", ROUNDINGS.index(check_word("rounding", rounding, ROUNDINGS))),
            ("seed", check_int("seed", seed, 0, 2**63 - 1)),
            *fields,
            *rope_fields,
            *kept_fields(*sizes, precision, k.dtype),
        ),
        operands=(*operands, *rope_operands),
        results=tuple(Result(KV_FIELDS[name], extents, dtype) for name, (dtype, extents) in wanted.items()),
        zeros=isinstance(shape.length, int) and shape.length == 0,
    )


QUANTIZE_KV = Op(
    "quantize_kv",
    ("k", "v", "lens", "rope.cos", "rope.sin", "rope.positions_k"),
    ("precision", "rounding", "seed", "interleaved", "kernel"),
    _plan,
    indices=("lens", "rope.positions_k"),
)
