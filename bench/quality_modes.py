"""The modes of computation of a model whose quality is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """One mode. attention: transformers' attn_implementation; dtype: None is that of the measurement."""

    name: str
    attention: str
    dtype: str | None = None
    int8_pages: bool = False
    int8_linear: bool = False


TRUTH = Mode("sdpa, float32", "sdpa", dtype="float32")
BASELINE = Mode("sdpa", "sdpa")
MODES = (
    BASELINE,
    Mode("qf", "qf"),
    Mode("qf_int8", "qf_int8"),
    Mode("qf_int8_fp8", "qf_int8_fp8"),
    Mode("qf, INT8 pages", "qf", int8_pages=True),
    Mode("qf, INT8 linear", "qf", int8_linear=True),
    Mode("qf_int8, INT8 linear", "qf_int8", int8_linear=True),
    Mode("qf, INT8 pages and linear", "qf", int8_pages=True, int8_linear=True),
)
