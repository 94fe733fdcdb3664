"""Triton's own attention kernel, from its tutorial 06-fused-attention.py: in Triton's repository, not in its package.

$QFLASH_TRITON_TUTORIAL names the file. If it is not set, the peer is omitted, and rows say so.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.arrays import Arrays, Candidate
from bench.run import Unavailable
from qflash.testing import Case
from qflash.testing.timing import Call

NAME, VARIABLE = "Triton tutorial", "QFLASH_TRITON_TUTORIAL"
HEAD_DIMS, ROWS = (16, 32, 64, 128, 256), 128  # it masks no row: lengths are multiples of a tile


def triton_tutorial() -> Candidate:
    """The tutorial's `attention`, tuned by its own autotuner before anything is timed."""

    def make(arrays: Arrays) -> Call:
        if problem := why_not(arrays.case):
            raise Unavailable(problem)
        function = tutorial(os.environ.get(VARIABLE, "")).attention
        q, k, v = arrays.torch_bhtd
        causal, scale = arrays.case.causal, 1 / math.sqrt(arrays.case.head_dim)

        def run() -> Any:
            return function(q, k, v, causal, scale, False)  # the last: no warp specialization, an option for Hopper

        try:
            run()
        except Exception as error:  # it is a third-party file: if it raises anything, it does not take part
            said, *_ = [*str(error).strip().splitlines(), ""]
            raise Unavailable(f"{type(error).__name__}: {said}") from error
        return run

    return Candidate(NAME, make, bhtd=True)


def why_not(case: Case) -> str:
    """Why the tutorial does not support a problem, or ""."""
    if case.dtype != "float16":
        return f"takes float16, not {case.dtype}"
    if (case.q_heads, case.q_len) != (case.kv_heads, case.k_len):
        return "takes as many keys as queries, of as many heads"
    if case.head_dim not in HEAD_DIMS or case.q_len % ROWS:
        return f"takes head_dim {', '.join(map(str, HEAD_DIMS))} and multiples of {ROWS} tokens"
    return ""


@lru_cache(maxsize=1)
def tutorial(path: str) -> ModuleType:
    """The file as a module; Unavailable if it is not one."""
    if not path:
        raise Unavailable(
            f"${VARIABLE} names no file; it is python/tutorials/06-fused-attention.py of Triton's sources"
        )
    if not Path(path).is_file():
        raise Unavailable(f"${VARIABLE} is {path!r}, where no file is")
    spec = importlib.util.spec_from_file_location("triton_tutorial", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Triton looks for the sources of kernels
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Unavailable(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, "attention"):
        raise Unavailable(f"{path} has no function `attention`")
    return module
