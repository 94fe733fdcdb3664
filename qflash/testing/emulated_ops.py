"""Any operation on NumPy arrays as if they were on a GPU: planned for a GPU, and run by the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qflash import dispatch
from qflash.backends import cuda
from qflash.call.op import Op
from qflash.call.prepare import bind
from qflash.frontends import numpy as numpy_frontend
from qflash.jit.cache import Cache
from qflash.testing import emulator


class EmulatedGpu:
    """`run` replaces the NumPy front end's: set it there, and public calls go through it."""

    def __init__(self, cache: Cache | None = None, arch: int = emulator.ARCH):
        self.cache, self.arch = cache, arch
        self.multiprocessors = emulator.MULTIPROCESSORS
        self.launched: list[str] = []  # kernels, in order

    def run(self, op: Op, arrays: Sequence[Any], words: Sequence[Any]) -> list[np.ndarray]:
        """Plan, allocate and call; results are filled beforehand with bytes that no kernel writes."""
        arrays = [
            x if x is None or name in op.writes else np.asarray(x, order="C")
            for name, x in zip(op.arrays, arrays, strict=True)
        ]
        described = (
            None if x is None else replace(numpy_frontend.describe(name, x, op.arrays[0]), device="cuda")
            for name, x in zip(op.arrays, arrays, strict=True)
        )
        plan = op.plan(*described, *words)
        spec = plan.spec(self.arch)
        kernel = dispatch.choose(spec, plan.kernel)
        operands = [_as_read(arrays[op.arrays.index(one.argument)], one.dtype) for one in plan.operands]
        results = [
            emulator.poisoned(int(np.prod(one.shape)) * np.dtype(one.dtype).itemsize).view(one.dtype).reshape(one.shape)
            for one in plan.results
        ]
        library = emulator.load(emulator.with_all_scores(cuda.unit(kernel, spec)), self.cache)
        arrays = [*operands, *results]
        library.launch(bind(plan, kernel, library.entry), arrays, multiprocessors=self.multiprocessors)
        self.launched.append(kernel.name)
        return results


def _as_read(x: np.ndarray, dtype: str | None) -> np.ndarray:
    return x if dtype is None else x.astype(dtype)
