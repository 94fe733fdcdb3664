"""CUDA kernels: chooses the specialisation that serves a Spec; qflash.jit compiles it on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from qflash import dispatch
from qflash.backends import Entry
from qflash.backends.arch import ARCHES, asked
from qflash.call.spec import ACTIVATIONS, KV_KINDS, OP_DTYPES, PRECISIONS, Spec
from qflash.dispatch import BY_NAME, Kernel, Variant, reasons
from qflash.jit import load, prebuild
from qflash.jit.compiler import Unit

_CSRC = Path(__file__).resolve().parent.parent / "csrc"


def target(arch: int) -> str:
    """nvcc's name for a compute capability times ten. Hopper's own instructions need the "a"."""
    return "90a" if arch == 90 else str(arch)


def unit(kernel: Kernel, spec: Spec) -> Unit:
    """The compilation unit of `kernel` that serves `spec`. For the architecture of QFLASH_CUDA_ARCH it is PTX."""
    defines, words = [], []
    if kernel.per_dtype:
        defines.append(("QF_DTYPE", str(OP_DTYPES.index(spec.dtype))))
    if kernel.per_arch:
        defines.append(("QF_ARCH", str(spec.arch)))
    if kernel.head_dims:
        head_dim = next(bucket for bucket in kernel.head_dims if bucket >= spec.head_dim)
        defines.append(("QF_HEAD_DIM", str(head_dim)))
        words.append(f"head_dim {head_dim}")
    words.append(spec.dtype if kernel.per_dtype else "any dtype")
    if kernel.per_precision:
        defines.append(("QF_PRECISION", str(PRECISIONS.index(spec.precision))))
        words.append(spec.precision)
    if kernel.per_kv:
        kind = dict(kernel.shared_kvs).get(spec.kv, spec.kv)
        defines.append(("QF_KV_KIND", str(KV_KINDS.index(kind))))
        words.append(f"{kind} k and v")
    if kernel.per_batch_invariance:
        defines.append(("QF_BATCH_INVARIANT", str(int(spec.batch_invariant))))
        words += ["batch-invariant"] if spec.batch_invariant else []
    if kernel.per_activation:
        defines.append(("QF_ACTIVATION", str(ACTIVATIONS.index(spec.activation))))
        words += [spec.activation] if spec.activation else []
    if kernel.per_scores:
        defines.append(("QF_PLAIN_SCORES", str(int(spec.plain_scores))))
        words += [] if spec.plain_scores else ["softcap"]
    return Unit(
        kernel.name,
        _CSRC / "kernels" / kernel.op / kernel.name / "launch.cu",
        (_CSRC, _CSRC / "include"),
        tuple(defines),
        target(spec.arch),
        f"{kernel.name} ({', '.join(words)})",
        spec.arch == asked(),
        kernel.parts,
    )


def entry(kernel: Kernel, spec: Spec) -> Entry:
    """Addresses of the kernel's functions for `spec`; compiles on first use."""
    return _entry(kernel.name, unit(kernel, spec))


_compiling = threading.Lock()


def _entry(name: str, chosen: Unit) -> Entry:
    with _compiling:  # if two threads need the same kernel, it is loaded once
        return _load(name, chosen)


@lru_cache(maxsize=1024)
def _load(name: str, chosen: Unit) -> Entry:
    library = load.load(chosen)
    symbols = (f"qf_{name}", "qf_status_text", f"qf_{name}_workspace")
    return Entry(*(load.address(library, symbol) for symbol in symbols))


def specialisations(arches: Iterable[int] = ARCHES, kernels: Iterable[str] | None = None) -> list[Unit]:
    """Every unit of the named CUDA kernels (all of them by default) for the given architectures."""
    chosen = _cuda_kernels() if kernels is None else [_cuda_kernel(name) for name in kernels]
    units = (unit(kernel, spec) for arch in arches for kernel in chosen for spec in specs(kernel, arch))
    return list(dict.fromkeys(units))


def unit_of(variant: Variant, dtype: str, head_dim: int, arch: int) -> Unit:
    """The compilation unit of a variant of a kernel."""
    return unit(variant.kernel, variant.spec(arch, dtype, head_dim))


def specs(kernel: Kernel, arch: int) -> list[Spec]:
    """The simplest Spec of each library that `kernel` has for an architecture."""
    found = (
        Spec(
            *("cuda", arch, dtype, head_dim, precision),
            op=kernel.op,
            kv=kv,
            plain_scores=plain_scores,
            few_rows=kernel.few_rows,
            batch_invariant=batch_invariant,
            activation=activation,
        )
        for activation in (ACTIVATIONS if kernel.per_activation else ("",))
        for batch_invariant in ((False, True) if kernel.per_batch_invariance else (False,))
        for plain_scores in ((True, False) if kernel.per_scores else (True,))
        for dtype in kernel.dtypes
        for head_dim in kernel.head_dims or (0,)
        for kv in kernel.kvs
        for precision in kernel.precisions_of(kv)
    )
    return [spec for spec in found if not reasons(kernel, spec)]


def _cuda_kernels() -> list[Kernel]:
    """The kernels that are compiled here; kernels of other backends run on the same GPUs."""
    return [kernel for kernel in dispatch.KERNELS if kernel.backend == "cuda"]


def _cuda_kernel(name: str) -> Kernel:
    kernel = BY_NAME.get(name)
    if kernel is None or kernel.backend != "cuda":
        allowed = ", ".join(other.name for other in _cuda_kernels())
        raise ValueError(f"kernel is {name!r}; allowed: {allowed}")
    return kernel


def build(
    arches: Iterable[int],
    kernels: Sequence[str] | None = None,
    progress: Callable[[Unit, int, int], None] | None = None,
) -> list[Path]:
    """Compile every specialisation ahead of time into the cache the kernels are loaded from."""
    return prebuild.prebuild(specialisations(arches, kernels), progress=progress)
