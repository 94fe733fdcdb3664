"""Kernel: a row of the table, with every fact that choosing, compiling and testing a kernel needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qflash.call.spec import DTYPES, Spec

# Head dims that most kernels of attention are compiled for; each serves every smaller one down to the next.
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
HALVES = ("float16", "bfloat16")


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
