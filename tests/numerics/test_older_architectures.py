"""The code paths of older GPUs, run on this one: their PTX, translated by the driver (QFLASH_CUDA_ARCH)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qflash import dispatch

pytestmark = pytest.mark.gpu

CUDA_KERNELS = (*dispatch.variants_of("attention", "cuda"), *dispatch.variants_of("attention_backward", "cuda"))


@pytest.mark.parametrize("arch", [75, 80])
def test_every_kernel_meets_the_contract_as_for(arch):
    served = [row for row in CUDA_KERNELS if not dispatch.arch_reasons(row.kernel, arch)]
    names = [word for row in served for word in ("--kernel", row.name)]
    command = [sys.executable, "-m", "qflash.cli", "verify", "--quick", *names]
    done = subprocess.run(command, env=os.environ | {"QFLASH_CUDA_ARCH": str(arch)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Of the operations beside attention: the file and the tests in it, every shape and layout.
OPERATIONS = {
    "test_int8_matmul.py": "gpu and (sums_are_exact or scales_bias_and_types or large_problems)",
    "test_linear_gpu.py": "sums or gradients",
    "test_reductions.py": "test_every_case and cuda",
    "test_row_gradients.py": "test_every_case and cuda",
}


@pytest.mark.parametrize("arch", [75, 80])
@pytest.mark.parametrize("file", OPERATIONS)
def test_operations_are_right_as_for(file, arch):
    tests = str(Path(__file__).with_name(file))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", OPERATIONS[file], tests]
    done = subprocess.run(command, env=os.environ | {"QFLASH_CUDA_ARCH": str(arch)}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
