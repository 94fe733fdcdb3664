"""Linear-layer kernels on the current GPU, by their C structs: layouts that no front end uses, and outputs of which
every byte is checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from qflash import _native
from qflash.backends import cuda
from qflash.dispatch import BY_NAME
from qflash.testing.emulator import packed
from qflash.testing.linear_calls import LinearCall, backward, forward, spec_of
from qflash.testing.linear_problems import Arrays, LinearProblem
from qflash.testing.runner import arch_of, to_numpy, to_torch


def run_linear(kernel: str, problem: LinearProblem, arrays: Arrays, *, pad: int = 0, keep_pre: bool = False) -> Arrays:
    """The results of a call."""
    return _launch(kernel, problem, forward(problem, arrays, pad, keep_pre))


def run_gradients(kernel: str, problem: LinearProblem, arrays: Arrays, dout: np.ndarray, saved: Arrays) -> Arrays:
    """The gradients of all inputs of a call."""
    return _launch(kernel, problem, backward(problem, arrays, dout, saved))


def _launch(kernel: str, problem: LinearProblem, call: LinearCall) -> Arrays:
    import torch

    entry = cuda.entry(BY_NAME[kernel], spec_of(kernel, problem, arch_of("cuda")))
    results = {name: to_torch(memory, "cuda") for name, memory in call.memory.items()}
    # GPU memory is aligned at its beginning; operands at the end of readable memory usually are not.
    read = {name: _placed(x, int(problem.at_end)) for name, x in call.arrays.items() if name not in results}
    fields = call.numbers | {name: x.data_ptr() for name, x in (read | results).items()}
    prepared = _native.Call(
        call.struct, packed(call.struct, fields), [], entry.address, entry.status_text, entry.workspace
    )
    workspace = torch.full((prepared.workspace_bytes,), 255, dtype=torch.uint8, device="cuda")  # NaN in any format
    prepared(workspace.data_ptr(), torch.cuda.current_stream().cuda_stream, 0)
    torch.cuda.synchronize()
    return call.results({name: to_numpy(x) for name, x in results.items()})


def _placed(x: np.ndarray, shift: int) -> Any:
    """x on the GPU with its strides, `shift` elements past the start of its memory, which the host has filled."""
    if x.size == 0:
        return to_torch(x, "cuda")
    strides = [stride // x.itemsize for stride in x.strides]
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(x.shape, strides, strict=True))
    memory = np.zeros(shift + span, x.dtype)
    memory[shift:] = np.lib.stride_tricks.as_strided(x, (span,), (x.itemsize,))
    return to_torch(memory, "cuda").as_strided(x.shape, strides, shift)
