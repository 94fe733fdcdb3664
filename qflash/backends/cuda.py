"""CUDA kernels: which specialisation serves a Spec, compiled by qflash.jit on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from qflash.backends import Entry
from qflash.backends.arch import ARCHES, asked
from qflash.dispatch import BY_NAME, KERNELS, Kernel, arch_reasons
from qflash.jit import load, prebuild
from qflash.jit.compiler import Unit
from qflash.spec import OP_DTYPES, OpSpec, Spec

_CSRC = Path(__file__).resolve().parent.parent / "csrc"

# Kernels compiled for a head_dim serve every smaller one down to the next bucket; the true head_dim comes at run time.
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
# Kernels that have fewer buckets, by page: they compute in panels of 64 channels, or of 64 and then 128.
_OWN_HEAD_DIMS = {"sm90_fwd": HEAD_DIMS[1:], "sm90_int8": (64, 128, 256), "sm90_quantize": (64, 128, 256)}
# Kernels that take any head_dim and architecture at run time: one library per dtype and target.
_ONE_FOR_ALL = ("unfused",)
# Operations whose kernels are compiled for a bucket of HEAD_DIMS.
_WITH_HEADS = ("attention", "attention_int8", "attention_kv", "quantize_kv")


# Rows whose libraries come from one source: (its folder and entry, what it is compiled for).
_SHARED = {
    "sm90_int8": ("sm90_int8", ("QF_PRECISION", "1")),
    "sm90_int8_fp8": ("sm90_int8", ("QF_PRECISION", "2")),
    "sm90_int8_kv": ("sm90_int8", ("QF_PRECISION", "1")),
    "sm90_int8_fp8_kv": ("sm90_int8", ("QF_PRECISION", "2")),
    "fa_int8": ("fa_int8", ("QF_KV_KIND", "0")),
    "fa_int8_quantized": ("fa_int8", ("QF_KV_KIND", "1")),
}


def stem(kernel: str) -> str:
    """The folder of a kernel's source, and its entry without "qf_"."""
    return _SHARED[kernel][0] if kernel in _SHARED else kernel


def target(arch: int) -> str:
    """nvcc's name for a compute capability times ten. Hopper's own instructions need the "a"."""
    return "90a" if arch == 90 else str(arch)


def buckets(kernel: Kernel) -> tuple[int, ...]:
    """The head dims that `kernel` is compiled for; (0,) where there are none."""
    if kernel.op not in _WITH_HEADS:
        return (0,)
    return _OWN_HEAD_DIMS.get(kernel.page or kernel.name, HEAD_DIMS)


def unit(kernel: Kernel, dtype: str, head_dim: int, arch: int) -> Unit:
    """The compilation unit of `kernel` for a dtype, one of its buckets and an architecture.

    For the one that QFLASH_CUDA_ARCH asks for it is PTX.
    """
    defines = [("QF_DTYPE", str(OP_DTYPES.index(dtype)))] if kernel.per_dtype else []
    words = dtype if kernel.per_dtype else "any dtype"
    if kernel.op not in _WITH_HEADS:
        defines.append(("QF_ARCH", str(arch)))
    elif kernel.name not in _ONE_FOR_ALL:
        defines += [("QF_ARCH", str(arch)), ("QF_HEAD_DIM", str(head_dim))]
        words = f"head_dim {head_dim}, {dtype}"
    if kernel.name in _SHARED:
        defines.append(_SHARED[kernel.name][1])
    source = _CSRC / "kernels" / stem(kernel.name) / "launch.cu"
    includes = (_CSRC, _CSRC / "include")
    return Unit(
        kernel.name, source, includes, tuple(defines), target(arch), f"{kernel.name} ({words})", arch == asked()
    )


def unit_of(kernel: Kernel, spec: Spec | OpSpec) -> Unit:
    """The compilation unit that serves `spec`."""
    if kernel.op not in _WITH_HEADS:
        return unit(kernel, spec.dtype, 0, spec.arch)
    return unit(kernel, spec.dtype, next(bucket for bucket in buckets(kernel) if bucket >= spec.head_dim), spec.arch)


def entry(kernel: Kernel, spec: Spec | OpSpec) -> Entry:
    """Addresses of the kernel's functions for `spec`; compiles on first use."""
    return _entry(kernel.name, unit_of(kernel, spec))


_compiling = threading.Lock()


def _entry(name: str, chosen: Unit) -> Entry:
    with _compiling:  # two threads that want the same kernel load it once
        return _load(name, chosen)


@lru_cache(maxsize=1024)
def _load(name: str, chosen: Unit) -> Entry:
    library = load.load(chosen)
    symbols = (f"qf_{stem(name)}", "qf_status_text", f"qf_{stem(name)}_workspace")
    return Entry(*(load.address(library, symbol) for symbol in symbols))


def specialisations(arches: Iterable[int] = ARCHES, kernels: Iterable[str] | None = None) -> list[Unit]:
    """Every unit of the named CUDA kernels (all of them by default) for the given architectures."""
    chosen = [row for row in KERNELS if row.device == "cuda"] if kernels is None else [_cuda_row(n) for n in kernels]
    units = (
        unit(kernel, dtype, head_dim, arch)
        for arch in arches
        for kernel in chosen
        if not arch_reasons(kernel, arch)
        for dtype in kernel.dtypes
        for head_dim in buckets(kernel)
        if not (kernel.also and kernel.also(_example(kernel, arch, dtype, head_dim)))
    )
    return list(dict.fromkeys(units))


def _example(kernel: Kernel, arch: int, dtype: str, head_dim: int) -> Spec | OpSpec:
    """The plainest spec that a unit serves, to ask a row's `also` whether the unit is wanted."""
    if kernel.op == "attention":
        return Spec("cuda", arch, dtype, head_dim, kernel.precision)
    return OpSpec(kernel.op, "cuda", arch, dtype)


def _cuda_row(name: str) -> Kernel:
    row = BY_NAME.get(name)
    if row is None or row.device != "cuda":
        allowed = ", ".join(row.name for row in KERNELS if row.device == "cuda")
        raise ValueError(f"kernel is {name!r}; allowed: {allowed}")
    return row


def build(
    arches: Iterable[int],
    kernels: Sequence[str] | None = None,
    progress: Callable[[Unit, int, int], None] | None = None,
) -> list[Path]:
    """Compile every specialisation ahead of time into the cache the kernels are loaded from."""
    return prebuild.prebuild(specialisations(arches, kernels), progress=progress)
