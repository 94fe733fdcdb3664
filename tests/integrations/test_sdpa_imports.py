"""The names of qflash.integrations.sdpa without torch, and without its tensors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import qflash


def test_neither_name_imports_torch():
    code = (
        "import sys, qflash\n"
        "from qflash import replace_sdpa, scaled_dot_product_attention\n"
        "from qflash.integrations import sdpa\n"
        "qflash.replace_sdpa()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_numpy_arrays_are_told_who_serves_them():
    x = np.ones((1, 2, 3, 4), np.float32)
    with pytest.raises(TypeError, match=r"query is numpy\.ndarray; allowed: torch\.Tensor"):
        qflash.scaled_dot_product_attention(x, x, x)
