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


@pytest.mark.parametrize("arch", [75, 80])
def test_linear_layers_are_right_as_for(arch):
    tests = str(Path(__file__).parent / "test_linear_gpu.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "sums or gradients", tests]
    done = subprocess.run(command, env=os.environ | {"QFLASH_CUDA_ARCH": str(arch)}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
