"""`quantize`'s CUDA kernels run on the CPU, thread by thread (emulator/cuda_on_host.h): the replay's bits."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from qflash import _native, replay_quantize
from qflash.backends import cuda
from qflash.spec import DTYPES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the PATH")

HERE = Path(__file__).parent / "emulator"
CSRC = Path(cuda.__file__).resolve().parent.parent / "csrc"
UNTOUCHED = 77


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """library(dtype): the emulated kernels, compiled once per session."""
    folder = tmp_path_factory.mktemp("emulated-quantize")

    @cache
    def build(dtype: str) -> ctypes.CDLL:
        output = folder / f"quantize-{dtype}.so"
        command = [
            "g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", f"-I{CSRC}", f"-I{CSRC / 'include'}",
            f"-DQF_DTYPE={DTYPES.index(dtype)}", "-include", str(HERE / "cuda_on_host.h"), str(HERE / "quantize.cc"),
            "-o", str(output),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(output))

    return build


def params(**fields) -> bytes:
    """A QfQuantizeParams; arrays become their addresses."""
    size, layout = _native.op_layouts["QfQuantizeParams"]
    packed = bytearray(size)
    for name, value in {"struct_bytes": size, **fields}.items():
        offset, kind = layout[name]
        value = value.ctypes.data if isinstance(value, np.ndarray) else value
        struct.pack_into(kind, packed, offset, value or 0)
    return bytes(packed)


def dtype_of(x: np.ndarray) -> str:
    return np.dtype(x.dtype).name


def strides(name: str, x: np.ndarray) -> dict[str, int]:
    """Of [B, T, H, D], or packed [T, H, D]."""
    steps = [step // x.itemsize for step in x.strides[:-1]]
    return dict(zip((f"{name}.stride_{axis}" for axis in "bth"), [0] * (3 - len(steps)) + steps, strict=True))


def run(library, x, *, group=None, symmetric=True, smooth=False, seed=None, lens=None, rope=None, order=1, cu=None,
        longest=0, **more):  # fmt: skip
    """What the emulated kernels write: a replay_quantize.Integers."""
    batch, length = (len(cu) - 1, longest) if cu is not None else x.shape[:2]
    heads, dim = x.shape[-2:]
    groups = -(-length // (group or 1))
    values = np.full(x.shape, UNTOUCHED, np.int8)
    scale = np.full(1 if group is None else (batch, heads, groups), UNTOUCHED, np.float32)
    zero_point = None if symmetric else np.full(1, UNTOUCHED, np.int32)
    mean = np.full((batch, heads, dim), UNTOUCHED, np.float32) if smooth else None
    sums = np.full((batch, heads, length), UNTOUCHED, np.int32)
    fields = {
        "batch": batch, "length": length, "heads": heads, "head_dim": dim, "dtype": DTYPES.index(dtype_of(x)),
        "granularity": int(group is not None), "group": group or 1, "symmetric": int(symmetric),
        "smooth": int(smooth), "rounding": int(seed is not None), "seed": seed, "num_threads": order,
        "x.data": x, **strides("x", x), "values.data": values, **strides("values", values), "scale": scale,
        "zero_point": zero_point, "sums": sums, "mean": mean, "lens": lens, "cu_seqlens": cu,
        "total": 0 if cu is None else len(x), **more,
    }  # fmt: skip
    if rope is not None:
        tables = [np.ascontiguousarray(table, np.float32) for table in (rope.cos, rope.sin)]
        fields |= {"rope.cos": tables[0], "rope.sin": tables[1], "rope.rows": len(tables[0])}
        fields |= {"rope.rotary_dim": 2 * tables[0].shape[1], "rope.interleaved": int(rope.interleaved)}
        for axis in "qk":
            positions = getattr(rope, f"positions_{axis}")
            if positions is not None:
                fields[f"rope.positions_{axis}"] = positions
                fields[f"rope.stride_positions_{axis}_b"] = length if positions.ndim == 2 else 0
    status = library(dtype_of(x)).qf_quantize(params(**fields), None)
    assert status == 0, status
    return replay_quantize.Integers(values, scale, zero_point, mean, sums)


def check_same(got, want) -> None:
    for name in ("values", "scale", "zero_point", "mean", "sums"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(a, b, err_msg=name)


def normal(shape, dtype="float32", seed=0, spread=1.0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(spread)
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


# shape, dtype, words
CASES = {
    "token": ((2, 37, 3, 64), "float32", {"group": 1}),
    "group": ((2, 37, 3, 64), "bfloat16", {"group": 16}),
    "group of 3": ((1, 20, 2, 24), "float16", {"group": 3}),
    "group over two warps": ((1, 40, 2, 128), "bfloat16", {"group": 32}),
    "group over a block": ((1, 80, 1, 128), "float32", {"group": 64}),
    "group past a block": ((1, 150, 2, 128), "float16", {"group": 70}),
    "tensor": ((2, 19, 3, 40), "float32", {}),
    "asymmetric": ((2, 19, 3, 40), "bfloat16", {"symmetric": False}),
    "odd head_dim": ((1, 21, 2, 37), "float16", {"group": 4}),
    "one channel": ((1, 9, 2, 1), "float32", {"group": 1}),
    "rows of two warps": ((1, 5, 1, 400), "float32", {"group": 1}),
    "groups of rows of two warps": ((1, 11, 1, 500), "bfloat16", {"group": 4}),
    "wide": ((1, 3, 1, 2056), "bfloat16", {"group": 1}),
    "wide, walked": ((1, 2, 1, 9001), "float32", {"group": 1, "seed": 3}),
    "wide groups": ((1, 5, 1, 2100), "float16", {"group": 2}),
    "wide tensor": ((1, 2, 2, 8200), "float32", {"symmetric": False}),
    "wide, smoothed": ((1, 70, 1, 2100), "bfloat16", {"group": 1, "smooth": True}),
    "stochastic": ((1, 21, 2, 64), "bfloat16", {"group": 16, "seed": 7}),
    "stochastic, odd": ((2, 7, 3, 13), "float32", {"group": 1, "seed": 2**62 + 5}),
    "stochastic, asymmetric": ((1, 21, 2, 64), "float32", {"symmetric": False, "seed": 1}),
    "smooth": ((2, 150, 2, 64), "bfloat16", {"group": 16, "smooth": True}),
    "smooth, odd": ((1, 70, 3, 11), "float32", {"group": 5, "smooth": True}),
    "smooth tensor": ((1, 70, 3, 16), "float16", {"smooth": True}),
    "smooth, asymmetric": ((1, 70, 3, 16), "float16", {"smooth": True, "symmetric": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_the_replay(library, name):
    shape, dtype, words = CASES[name]
    x = normal(shape, dtype) + normal((1, 1, *shape[2:]), dtype, seed=1, spread=3)
    first = run(library, x, **words, order=1)
    check_same(first, replay_quantize.quantize(x, **{"group": None, **words}))
    check_same(first, run(library, x, **words, order=2))
