"""What is measured: named lists of problems, and the qflash kernels that run them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from qflash.dispatch import VARIANTS
from qflash.testing import Case

FORWARD, BACKWARD, TRAIN, DECODE, OVERHEAD = "forward", "backward", "train", "decode", "overhead"
MIXED, WRITE = "mixed", "write"  # decoding of sequences of many lengths; new tokens into pages


@dataclass(frozen=True)
class Preset:
    """Problems of one kind on one device. `kernels` are names in qflash.dispatch.VARIANTS."""

    name: str
    title: str
    device: str
    kind: str
    kernels: tuple[str, ...]
    cases: tuple[Case, ...]
    peers: tuple[str, ...] | None = None  # names in bench.peers; None: all that the device has
    graph: bool = False  # CUDA: short calls are replayed from a graph, so that the host's share is not counted
    best: bool = False  # whether the relevant figure is the ratio to the best peer of each problem
    rope: bool = False  # whether every kernel also runs with rope
    framework: str = "torch"  # or "jax", jitted
    page_sizes: tuple[int, ...] = ()  # of variants on pages, and of peers; INT8 pages have the first


_RUNGS = ("unfused", "fa", "fa_warps", "fa_tc", "fa_mma", "sm90_fwd", "fa_int8", "sm90_int8", "sm90_int8_fp8")
# The CUDA attention kernels from the first rung to the last, without those that are not in the table yet.
LADDER = tuple(name for name in _RUNGS if name in VARIANTS)


def _square(length: int, head_dim: int, causal: bool, heads: int = 8, batch: int = 1, dtype: str = "float32") -> Case:
    sizes = {"q_len": length, "k_len": length, "q_heads": heads, "kv_heads": heads, "head_dim": head_dim}
    name = f"T={length} D={head_dim} {'causal' if causal else 'full'}"
    return Case(name=name, batch=batch, dtype=dtype, causal=causal, **sizes)


def _decode(keys: int, batch: int = 1, dtype: str = "float32") -> Case:
    sizes = {"q_len": 1, "k_len": keys, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
    return Case(name=f"B={batch} Tk={keys}", batch=batch, dtype=dtype, **sizes)


_CACHES = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (32, 2048), (128, 1024))
_PAGED_CACHES = (
    (1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 1024), (8, 8192), (32, 8192), (128, 1024), (128, 8192),
)  # fmt: skip
_SEQUENCES, _SHORTEST, _LONGEST = 64, 100, 20000


def _mixed() -> Case:
    """Lengths with evenly distributed logarithms, from a seed; k_len is their mean."""
    logarithms = np.random.default_rng(0).uniform(math.log(_SHORTEST), math.log(_LONGEST), _SEQUENCES)
    lens = tuple(round(math.exp(x)) for x in logarithms)
    case = _decode(round(sum(lens) / len(lens)), len(lens), "bfloat16")
    return replace(case, name=f"{len(lens)} lengths of {_SHORTEST} to {_LONGEST}", kv_lens=lens)


_PAGE_SIZES = (256, 16)


def _on_pages(peer: str) -> tuple[str, ...]:
    return tuple(f"{peer}, pages of {size}" for size in _PAGE_SIZES)


_CPU = tuple(_square(t, d, causal) for t in (1024, 4096) for d in (64, 128) for causal in (False, True))


def _grid(dtypes: tuple[str, ...], head_dims: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Case, ...]:
    """16384 tokens of 2048 channels, divided into sequences and heads in different ways."""
    return tuple(
        _square(t, d, causal, heads=2048 // d, batch=16384 // t, dtype=dtype)
        for dtype in dtypes
        for d in head_dims
        for t in lengths
        for causal in (False, True)
    )


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# The kernel that is compared with the best alternatives on a Hopper GPU.
HOPPER = next(name for name in ("sm90_fwd", "fa_mma") if name in VARIANTS)
# Quantized, on Hopper: with the quantization of q, k and v; of only q, with quantized k and v; and without any.
_HOPPER_INT8 = ("sm90_int8", "sm90_int8_kv", "sm90_int8_fp8", "sm90_int8_fp8_kv")

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("cpu", "CPU forward, B=1 H=8", "cpu", FORWARD, ("cpu", "cpu_int8"), _CPU),
        Preset(
            "cpu-decode",
            "CPU decode, one query on Hq=32 Hkv=8 D=128",
            "cpu",
            DECODE,
            ("cpu",),
            tuple(_decode(keys) for keys in (2048, 8192, 32768)),
        ),
        Preset(
            "cpu-decode-pages",
            "CPU decode on pages, one query on Hq=32 Hkv=8 D=128",
            "cpu",
            DECODE,
            ("cpu", "cpu_pages", "cpu_pages_int8"),
            tuple(_decode(keys, batch) for batch, keys in ((1, 2048), (1, 8192), (1, 32768), (8, 2048))),
            peers=("torch SDPA",),
            page_sizes=_PAGE_SIZES,
        ),
        Preset(
            "cpu-train",
            "CPU forward and backward, B=1 H=8",
            "cpu",
            TRAIN,
            ("cpu",),
            tuple(_square(t, d, causal) for t, d in ((1024, 64), (2048, 128)) for causal in (False, True)),
        ),
        Preset(
            "cpu-overhead",
            "Cost of a call on tiny arrays",
            "cpu",
            OVERHEAD,
            ("cpu",),
            (Case(name="tiny", q_len=4, k_len=4, q_heads=2, kv_heads=2, head_dim=8),),
        ),
        Preset(
            "cuda",
            "CUDA forward, B·T=16384 H·D=2048",
            "cuda",
            FORWARD,
            tuple(name for name in reversed(LADDER) if VARIANTS[name].precision == "native"),
            _grid(("float32", "bfloat16"), (64, 128), (1024, 4096, 16384)),
        ),
        Preset(
            "ladder",
            "The ladder: every CUDA rung, float16, B·T=16384 H·D=2048",
            "cuda",
            FORWARD,
            (*LADDER, "fa_int8_quantized"),
            _grid(("float16",), (128, 64), _LENGTHS),
            peers=("torch naive", "torch FA2", "torch SDPA cudnn"),
            graph=True,
        ),
        *(
            Preset(
                name,
                f"fa_mma and FlashAttention 2 as PyTorch has it, {dtype}, B·T=16384 H·D=2048",
                "cuda",
                FORWARD,
                ("fa_mma",),
                _grid((dtype,), (64, 128), _LENGTHS),
                peers=("torch FA2",),
                graph=True,
            )
            for name, dtype in (("fa_mma", "bfloat16"), ("fa_mma-f16", "float16"))
            if "fa_mma" in VARIANTS
        ),
        Preset(
            "fa_int8",
            "fa_int8 with its quantization and alone, bfloat16, B·T=16384 H·D=2048",
            "cuda",
            FORWARD,
            ("fa_mma", "fa_int8", "fa_int8_quantized"),
            _grid(("bfloat16",), (128, 64), (4096, 8192, 16384)),
            peers=("torch FA2",),
            graph=True,
        ),
        Preset(
            "sm90",
            f"{HOPPER} and the best that runs on Hopper, B·T=16384 H·D=2048",
            "cuda",
            FORWARD,
            (HOPPER,),
            _grid(("bfloat16",), (64, 128, 256), _LENGTHS) + _grid(("float16",), (64, 128, 256), (4096,)),
            peers=("torch FA2", "torch SDPA cudnn", "FlashAttention 3"),
            graph=True,
            best=True,
        ),
        Preset(
            "decode",
            "CUDA decode, one query on Hq=32 Hkv=8 D=128, bfloat16",
            "cuda",
            DECODE,
            ("sm90_decode", "sm90_decode_kv", "decode", "decode_kv", "sm90_int8_kv"),
            tuple(_decode(keys, batch, "bfloat16") for batch, keys in _CACHES),
            peers=("torch SDPA cudnn", "FlashAttention 3", "FlashInfer"),
            graph=True,
            best=True,
        ),
        Preset(
            "decode_pages",
            "CUDA decode on pages, one query on Hq=32 Hkv=8 D=128, bfloat16",
            "cuda",
            DECODE,
            ("sm90_decode", "sm90_decode_pages", "sm90_decode_pages_int8", "decode", "decode_pages"),
            tuple(_decode(keys, batch, "bfloat16") for batch, keys in _PAGED_CACHES),
            peers=(
                "torch SDPA cudnn",
                *(name for peer in ("FlashAttention 3", "FlashInfer") for name in (peer, *_on_pages(peer))),
            ),
            graph=True,
            best=True,
            page_sizes=_PAGE_SIZES,
        ),
        Preset(
            "decode_mixed",
            f"CUDA decode on pages, {_SEQUENCES} sequences of {_SHORTEST} to {_LONGEST} tokens, bfloat16",
            "cuda",
            MIXED,
            ("sm90_decode_pages", "sm90_decode_pages_int8", "decode_pages"),
            (_mixed(),),
            peers=(_on_pages("FlashAttention 3")[0], _on_pages("FlashInfer")[0]),
            graph=True,
            page_sizes=_PAGE_SIZES[:1],
        ),
        Preset(
            "kv_write",
            "New tokens into pages of 256, a token a sequence, Hkv=8 D=128, bfloat16",
            "cuda",
            WRITE,
            ("kv_write_pages", "kv_write_pages_int8"),
            tuple(_decode(256, batch, "bfloat16") for batch in (1, 8, 128)),
            peers=(),
            graph=True,
            page_sizes=_PAGE_SIZES[:1],
        ),
        Preset(
            "backward",
            "CUDA backward alone, bfloat16, B·T=16384 H·D=2048",
            "cuda",
            BACKWARD,
            tuple(name for name in ("sm90_bwd", "fa_mma_bwd") if name in VARIANTS),
            _grid(("bfloat16",), (64, 128), (1024, 4096, 16384)),
            peers=("torch FA2", "torch SDPA cudnn"),
            best=True,
        ),
        Preset(
            "sm90-rope",
            f"{HOPPER} with and without rope, bfloat16, B·T=16384 H·D=2048",
            "cuda",
            FORWARD,
            (HOPPER,),
            _grid(("bfloat16",), (64, 128), (4096, 8192, 16384)),
            peers=(),
            graph=True,
            rope=True,
        ),
        Preset(
            "sm90-jax",
            f"{HOPPER} and cuDNN from JAX, jitted, bfloat16, B·T=16384 H·D=2048",
            "cuda",
            FORWARD,
            (HOPPER,),
            _grid(("bfloat16",), (64, 128), (2048, 8192)),
            peers=("jax.nn cudnn",),
            framework="jax",
        ),
        Preset(
            "sm90_int8",
            "Quantized on Hopper, with quantization and alone, bfloat16, B·T=16384 H·D=2048",
            "cuda",
            FORWARD,
            (*_HOPPER_INT8, HOPPER),
            _grid(("bfloat16",), (128, 64, 256), _LENGTHS),
            peers=("torch FA2", "torch SDPA cudnn", "FlashAttention 3", "FlashAttention 3 FP8"),
            graph=True,
            best=True,
        ),
        Preset(
            "triton",
            "CUDA and Triton side by side, B·T=16384 H·D=2048",
            "cuda",
            FORWARD,
            (HOPPER, "fa_mma", "triton_fwd", "sm90_int8", "fa_int8", "triton_int8"),
            # float16 is the dtype of Triton's tutorial
            _grid(("float16",), (64, 128), (1024, 4096, 16384)) + _grid(("bfloat16",), (64, 128), (4096,)),
            peers=("torch FA2", "torch naive", "torch.compile", "Triton tutorial"),
            graph=True,
        ),
        Preset(
            "triton-decode",
            "CUDA and Triton side by side, one query on Hq=32 Hkv=8 D=128, bfloat16",
            "cuda",
            DECODE,
            ("sm90_decode", "decode", "triton_decode", "sm90_decode_pages", "decode_pages", "triton_decode_pages"),
            tuple(_decode(keys, batch, "bfloat16") for batch, keys in _CACHES),
            peers=(),
            graph=True,
            page_sizes=_PAGE_SIZES[:1],
        ),
        Preset(
            "cuda-overhead",
            "Host time of a call on tiny CUDA tensors",
            "cuda",
            OVERHEAD,
            (HOPPER,),
            (Case(name="tiny", q_len=64, k_len=64, q_heads=2, kv_heads=2, head_dim=64, dtype="bfloat16"),),
        ),
    )
}

# Presets of `qflash run`: the forward pass, with many queries and with one at a time.
RUN = ("cpu", "cpu-decode", "cuda")


def for_device(device: str) -> list[Preset]:
    """The presets of "cpu" or "cuda"."""
    return [preset for preset in PRESETS.values() if preset.device == device]
