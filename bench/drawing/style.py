"""One table of colours and markers for all candidates, in every picture.

A colour is a pair: on white, and on GitHub's dark page. qflash's kernels have warm colours and solid lines; peers have
cool colours and dashed lines. The same peer under two names (FlashAttention 2 through PyTorch, cuDNN through JAX) has
one colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Colour:
    light: str
    dark: str


@dataclass(frozen=True)
class Look:
    """How one candidate is drawn."""

    colour: Colour
    marker: str
    line: str = "-"
    filled: bool = True


PAPER = Colour("#ffffff", "#0d1117")
INK = Colour("#1f2328", "#e6edf3")
QUIET = Colour("#59636e", "#9198a1")  # captions, limits
GRID = Colour("#d1d9e0", "#30363d")

# By qflash's kernels.
KERNELS = {
    "unfused": Look(Colour("#8a6a4f", "#b8977a"), "v"),
    "fa": Look(Colour("#a8561c", "#d98a4e"), "s"),
    "fa_warps": Look(Colour("#7d8500", "#b9c24a"), "D"),
    "fa_tc": Look(Colour("#b0527a", "#e08fb0"), "P"),
    "fa_mma": Look(Colour("#7a1f2b", "#c96a6a"), "^"),
    "fa_int8": Look(Colour("#c0399f", "#f17fd4"), "X"),
    "sm90_fwd": Look(Colour("#f0640a", "#ff8f3f"), "o"),
    "sm90_int8": Look(Colour("#cf1130", "#ff5c66"), "s"),
    "sm90_int8_fp8": Look(Colour("#b58300", "#f2cc4a"), "D"),
    "sm90_decode": Look(Colour("#d6336c", "#ff85b0"), "P"),
    "sm90_decode, INT8 pages of 256": Look(Colour("#a15c00", "#e8b04a"), "D"),
    "decode": Look(Colour("#7a4fd0", "#b79bff"), "X"),
    "triton_fwd": Look(Colour("#5f7a00", "#a8c93a"), "h"),
    "triton_int8": Look(Colour("#8f6b00", "#d9ad2b"), "p"),
    "triton_decode": Look(Colour("#a03fb0", "#e08cf0"), "H"),
    "sm90_bwd": Look(Colour("#f0640a", "#ff8f3f"), "o"),
    "fa_mma_bwd": Look(Colour("#7a1f2b", "#c96a6a"), "^"),
    "qflash": Look(Colour("#e0480c", "#ff7a45"), "o"),  # every layer of a model
    "cpu": Look(Colour("#e8560a", "#ff9a52"), "o"),
    "cpu_int8": Look(Colour("#c41034", "#ff6b76"), "s"),
}

_FA2 = Look(Colour("#0969da", "#58a6ff"), "o", "--")
_CUDNN = Look(Colour("#1a7f37", "#3fb950"), "^", "--")
PEERS = {
    "torch FA2": _FA2,
    "torch SDPA flash": _FA2,
    "FlashAttention 2": _FA2,
    "torch SDPA cudnn": _CUDNN,
    "jax.nn cudnn": _CUDNN,
    "FlashAttention 3": Look(Colour("#0891b2", "#39c5cf"), "s", "--"),
    "FlashAttention 3 FP8": Look(Colour("#8250df", "#bc8cff"), "D", "--"),
    "per-tensor FP8 (simulated)": Look(Colour("#b06bd6", "#d8a8f5"), "d", "--"),
    "FlashInfer": Look(Colour("#b5179e", "#ff7ad9"), "*", "--"),
    "torch SDPA": Look(Colour("#4338ca", "#8b8bff"), "P", "--"),
    "torch SDPA efficient": Look(Colour("#0f766e", "#2dd4bf"), "X", "--"),
    "torch naive": Look(Colour("#6e7781", "#8b949e"), "v", "--"),
    "torch.compile": Look(Colour("#57606a", "#afb8c1"), ">", "--"),
    "Triton tutorial": Look(Colour("#2f6f9f", "#79b8e8"), "h", "--"),
    "jax.nn": Look(Colour("#0a9396", "#5fd3c4"), "d", "--"),
    "HF default": Look(Colour("#7b8794", "#9aa5b1"), "v", "--"),
    "HF static, compiled": Look(Colour("#3e4c59", "#cbd2d9"), ">", "--"),
    "jax.nn xla": Look(Colour("#3d7ea6", "#86bbd8"), "<", "--"),
}

# Marker and line of a candidate on 16-bit pages, which has the same colour as on arrays.
PAGES = {"pages of 256": ("^", "-"), "pages of 16": ("v", ":")}

# For candidates without an entry above.
SPARE = tuple(
    Look(Colour(light, dark), marker, "-.")
    for light, dark, marker in (
        ("#5c6bc0", "#9fa8da", "h"),
        ("#00838f", "#4dd0e1", "p"),
        ("#6d4c41", "#bcaaa4", "<"),
        ("#558b2f", "#aed581", ">"),
        ("#ad1457", "#f48fb1", "H"),
        ("#455a64", "#b0bec5", "8"),
    )
)


def known(candidate: str) -> Look | None:
    """A candidate's entry in the table. Markers on pages are hollow; a partial or extended kernel is also dotted."""
    if candidate in PEERS:
        return PEERS[candidate]
    name = candidate.removeprefix("qflash ")
    if name in KERNELS:
        return KERNELS[name]
    alone, _, pages = candidate.rpartition(", ")
    if pages in PAGES and (look := known(alone)):
        marker, line = PAGES[pages]
        return replace(look, marker=marker, line=line, filled=False)
    base = name.partition(" (")[0].partition(",")[0]
    return replace(KERNELS[base], line=":", filled=False) if base in KERNELS else None


def looks(candidates: Iterable[str]) -> dict[str, Look]:
    """How each is drawn; those without an entry in the table use spare ones in turn."""
    names = list(dict.fromkeys(candidates))
    unknown = [name for name in names if known(name) is None]
    return {name: known(name) or SPARE[unknown.index(name) % len(SPARE)] for name in names}


def every_colour() -> list[Colour]:
    """All pairs that a picture may be drawn with."""
    drawn = [look.colour for look in (*KERNELS.values(), *PEERS.values(), *SPARE)]
    return list(dict.fromkeys((PAPER, INK, QUIET, GRID, *drawn)))
