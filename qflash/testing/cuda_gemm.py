"""Cases of `gemm_case` on the current GPU, through the C entry of a linear-layer kernel: arrays keep their gaps and
misalignment, and results are poisoned there, too."""

from __future__ import annotations

from typing import Any

import numpy as np

from qflash import _native
from qflash.backends import cuda
from qflash.call.spec import Spec
from qflash.dispatch import BY_NAME
from qflash.testing.emulator import packed
from qflash.testing.gemm_case import GemmCase
from qflash.testing.runner import arch_of


class Placed:
    """An array's memory on the GPU, with the same address modulo 256 bytes."""

    def __init__(self, x: np.ndarray):
        import torch

        self.memory = _memory_of(x)
        shift = self.memory.ctypes.data % 256
        self.tensor = torch.zeros(shift + self.memory.nbytes, dtype=torch.uint8, device="cuda")[shift:]
        self.tensor.copy_(torch.from_numpy(self.memory))
        self.address = self.tensor.data_ptr() + x.ctypes.data - self.memory.ctypes.data

    def fetch(self) -> None:
        """Copy the GPU's bytes to the array."""
        self.memory[...] = self.tensor.cpu().numpy()


def _memory_of(x: np.ndarray) -> np.ndarray:
    """All bytes of the allocation that contains x."""
    memory = x
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory.reshape(-1).view(np.uint8)


class CudaGemm:
    """A case on the GPU that can be run any number of times."""

    def __init__(self, case: GemmCase, kernel: str = "sm90_gemm"):
        import torch

        dtype = case.out_dtype if case.dtype == "int8" else case.dtype
        spec = Spec(
            *("cuda", arch_of("cuda"), dtype), precision=case.precision, op="linear", activation=case.activation
        )
        self.case, self.arrays = case, case.arrays()
        self.placed = {name: Placed(x) for name, x in self.arrays.items() if x is not None}
        fields: dict[str, Any] = case.fields(self.arrays)
        fields |= {name: placed.address for name, placed in self.placed.items()}
        entry = cuda.entry(BY_NAME[kernel], spec)
        params = packed("QfLinearParams", fields)
        self.call = _native.Call("QfLinearParams", params, [], entry.address, entry.status_text, entry.workspace)
        # NaN in any format
        self.workspace = torch.full((max(self.call.workspace_bytes, 1),), 255, dtype=torch.uint8, device="cuda")

    def run(self) -> dict[str, Any]:
        """The arrays of the case, with the results of one launch."""
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        self.call(self.workspace.data_ptr() if self.call.workspace_bytes else 0, stream, 0)
        torch.cuda.synchronize()
        for name in self.case.results:
            self.placed[name].fetch()
        return self.arrays


def check(case: GemmCase, kernel: str = "sm90_gemm") -> dict[str, Any]:
    """Run a case, and check its results against float64."""
    arrays = CudaGemm(case, kernel).run()
    case.check(arrays)
    return arrays
