"""Kernel: a row of the table, with all that is needed to choose, compile and test a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qflash.call.spec import DTYPES, Spec

# Head dims that most attention kernels are compiled for; each serves all smaller ones down to the next.
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a kernel supports, and all that is needed to wire it. The first usable row of its operation wins."""

    name: str
    device: str  # "cpu" or "cuda"
    summary: str
    op: str = "attention"
    backend: str = ""  # the module of qflash/backends that loads it; "": that of its device
    page: str | None = None  # docs/kernels/<page>.md describes it; None: the page with its name
    dtypes: tuple[str, ...] = DTYPES
    precisions: tuple[str, ...] = ("native",)
    kvs: tuple[str, ...] = ("arrays",)  # the kinds of k and v that it supports, of KV_KINDS
    kept_precisions: tuple[str, ...] = ()  # those with a QuantizedKV, if they are not `precisions`
    min_arch: int = 0
    later_arches: bool = True  # False: it uses instructions that GPUs after min_arch lack
    automatic: bool = True  # False: runs only if requested by name
    few_rows: bool = False  # serves only Spec.few_rows
    sinks: bool = False  # also serves Spec.sinks
    batch_invariant: bool = False  # also serves Spec.batch_invariant
    # False: NaN and infinity in v spread, within their channel, to all rows of a tile in which any row sees them
    hides_masked_nonfinite_v: bool = True
    also: Callable[[Spec], list[str]] | None = None  # further reasons it cannot serve a spec
    # CUDA: what a library is compiled for, one define each. head_dims: (): it takes any at run time.
    head_dims: tuple[int, ...] = ()
    per_dtype: bool = True
    per_arch: bool = True
    per_precision: bool = False
    per_kv: bool = False
    shared_kvs: tuple[tuple[str, str], ...] = ()  # with per_kv: (kind, the kind whose library serves it as well)
    per_batch_invariance: bool = False  # a library for Spec.batch_invariant, and one for the others
    per_activation: bool = False  # of linear: a library for each of ACTIVATIONS
    per_scores: bool = False  # a library for Spec.plain_scores, and one for the others
    parts: int = 1  # objects of a library that are compiled in parallel
    # Backward: why dS of a spec is not stored for dQ even if memory allows it (ops/backward_memory.py); "": it is.
    # None: the kernel never stores it.
    drops_ds: Callable[[Spec], str] | None = None
    # Quantized: (precision, kind of KV) to (head_dim, keys) by rising head_dim. Up to that head_dim, a problem with
    # fewer keys is usually faster without quantization; None: any problem is. `explain` notes it; from bench rows.
    pays_from: tuple[tuple[tuple[str, str], tuple[tuple[int, int | None], ...]], ...] = ()

    def __post_init__(self) -> None:
        if not self.backend:
            object.__setattr__(self, "backend", self.device)

    @property
    def precision(self) -> str:
        """Its precision, or the first of them."""
        return self.precisions[0]

    def precisions_of(self, kv: str) -> tuple[str, ...]:
        """Its precisions for this kind of k and v. A QuantizedKV has its own."""
        return self.kept_precisions if kv == "kept" and self.kept_precisions else self.precisions
