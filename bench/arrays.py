"""One problem's arrays in the form that each framework needs, and the class of candidates for attention."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

import qflash
from bench import run
from bench.run import Unavailable
from qflash.testing import Case
from qflash.testing.runner import to_numpy, to_torch


def load(*modules: str):
    """Import the first of `modules` that is installed, or raise Unavailable."""
    reasons = []
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            reasons.append(f"{module} cannot be imported: {error}")
    raise Unavailable("; ".join(reasons))


@lru_cache(maxsize=1)
def _numbers(flat: Case) -> tuple[np.ndarray, ...]:
    inputs = flat.make_inputs()
    return inputs.q, inputs.k, inputs.v


def _draw(case: Case) -> tuple[np.ndarray, ...]:
    """q, k, v of `case.make_inputs()`. A grid reshapes the same numbers, which are drawn once."""
    if case.data != "normal":  # then the data depends on the channel
        inputs = case.make_inputs()
        return inputs.q, inputs.k, inputs.v
    queries, keys = ((case.batch, length) for length in (case.q_len, case.k_len))
    shapes = [(*queries, case.q_heads, case.head_dim), *[(*keys, case.kv_heads, case.head_dim)] * 2]
    sizes = {"q_len": math.prod(shapes[0]), "k_len": math.prod(shapes[1])}
    flat = replace(case, name="flat", batch=1, q_heads=1, kv_heads=1, head_dim=1, causal=False, **sizes)
    return tuple(x.reshape(shape) for x, shape in zip(_numbers(flat), shapes, strict=True))


class Arrays:
    """One problem's q, k, v (`[B, T, H, D]`) and output gradient, as NumPy, torch or JAX arrays."""

    def __init__(self, case: Case, device: str):
        self.case = case
        self.device = device

    @cached_property
    def numpy(self) -> tuple[np.ndarray, ...]:
        return _draw(self.case)

    @cached_property
    def dout(self) -> np.ndarray:
        return self.case.make_gradients()[0]

    @cached_property
    def torch(self):
        load("torch")
        return tuple(to_torch(x, self.device) for x in self.numpy)

    @cached_property
    def torch_bhtd(self):
        """`[B, H, T, D]`, contiguous: the layout of torch's own attention."""
        return tuple(x.transpose(1, 2).contiguous() for x in self.torch)

    @cached_property
    def rope(self) -> qflash.Rope:
        """Tables (NumPy) that rotate every channel."""
        return qflash.Rope(*qflash.rope_tables(self.case.k_len, self.case.head_dim))

    @cached_property
    def torch_rope(self) -> qflash.Rope:
        return qflash.Rope(*(to_torch(table, self.device) for table in (self.rope.cos, self.rope.sin)))

    @cached_property
    def jax(self):
        jax = load("jax")
        device = jax.devices(self.device)[0]  # not JAX's default, which is the GPU if there is one
        return tuple(jax.device_put(x, device) for x in self.numpy)


@dataclass(frozen=True)
class Candidate(run.Candidate):
    """One way to compute attention."""

    bhtd: bool = False  # whether the result is [B, H, T, D] instead of [B, T, H, D]
    precision: str | None = None
    framework: str = "torch"
    rope: bool = False  # whether q and k are rotated
    int8_pages: bool = False  # whether k and v are read from INT8 pages
    int8_keys: bool = False  # whether k is read in INT8, v in the arrays' dtype: a QuantizedKV of precision "int8"

    def read(self, result: Any) -> np.ndarray:
        """A result of the call as `[B, T, H, D]`."""
        return np.moveaxis(to_numpy(result), 1, 2) if self.bhtd else to_numpy(result)
