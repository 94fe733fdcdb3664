"""What is measured: named lists of problems, and the qflash kernels that run them."""

from __future__ import annotations

from dataclasses import dataclass

from qflash.testing import Case

FORWARD, TRAIN, DECODE, OVERHEAD = "forward", "train", "decode", "overhead"


@dataclass(frozen=True)
class Preset:
    """Problems of one kind on one device. `kernels` are names in qflash.dispatch.KERNELS."""

    name: str
    title: str
    device: str
    kind: str
    kernels: tuple[str, ...]
    cases: tuple[Case, ...]


def _square(length: int, head_dim: int, causal: bool, heads: int = 8, batch: int = 1, dtype: str = "float32") -> Case:
    sizes = {"q_len": length, "k_len": length, "q_heads": heads, "kv_heads": heads, "head_dim": head_dim}
    name = f"T={length} D={head_dim} {'causal' if causal else 'full'}"
    return Case(name=name, batch=batch, dtype=dtype, causal=causal, **sizes)


def _decode(keys: int) -> Case:
    sizes = {"q_len": 1, "k_len": keys, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
    return Case(name=f"Tk={keys}", **sizes)


_CPU = tuple(_square(t, d, causal) for t in (1024, 4096) for d in (64, 128) for causal in (False, True))
# 16384 tokens of 2048 channels, however they are cut into sequences and heads.
_CUDA = tuple(
    _square(t, d, causal, heads=2048 // d, batch=16384 // t, dtype=dtype)
    for dtype in ("float32", "bfloat16")
    for d in (64, 128)
    for t in (1024, 4096, 16384)
    for causal in (False, True)
)

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
        Preset("cuda", "CUDA forward, B·T=16384 H·D=2048", "cuda", FORWARD, ("fa", "unfused"), _CUDA),
    )
}

# What `qflash run` shows: the forward pass, long and one token at a time.
RUN = ("cpu", "cpu-decode", "cuda")


def for_device(device: str) -> list[Preset]:
    """The presets of "cpu" or "cuda"."""
    return [preset for preset in PRESETS.values() if preset.device == device]
