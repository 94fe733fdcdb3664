"""Triton kernels on the CPU, by Triton's interpreter: one program of the grid after another, each operation by NumPy.

Triton decides when it is imported whether kernels are to be compiled or interpreted, so the interpreter has a process
of its own, which is started once and stays. What Triton 3.6's gets wrong is put right here (`_mend`): bfloat16, of which
it multiplies the bits and rounds towards zero, comparisons of scalars, and the ends of loops with newer NumPys.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np

from qflash import dispatch
from qflash.call.op import Plan

ARCH = 90  # what kernels are chosen for: tiles and constants of Hopper, unless a test asks for others
T = TypeVar("T")


def why_not() -> str:
    """Why nothing can be interpreted here; empty where it can."""
    return "" if find_spec("triton") else "the package triton is not installed: pip install 'qflash[triton]'"


def in_interpreter(function: Callable[..., T], *arguments: Any) -> T:
    """`function` of a module that any process can import, called where Triton interprets."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return function(*arguments)
    return _interpreter().submit(function, *arguments).result()


@lru_cache(maxsize=1)
def _interpreter() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, get_context("spawn"), _begin)
    atexit.register(pool.shutdown, cancel_futures=True)
    return pool


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def launch(plan: Plan, arrays: Sequence[np.ndarray | None], arch: int = ARCH) -> None:
    """Carry a plan out: choose the kernel as for a GPU, and interpret it. To be called in the interpreter's process.

    arrays: operands and results in the order of the plan, as the kernel takes them; None is a null pointer.
    """
    spec = plan.spec(arch)
    kernel = dispatch.choose(spec, plan.kernel)
    from qflash.backends import triton as backend

    _mend()
    _run(backend.launches(kernel, spec), plan, arrays)


def _run(launches, plan: Plan, arrays: Sequence[np.ndarray | None]) -> None:
    from qflash import _native

    _, layout = _native.op_layouts[plan.struct]
    fields: dict[str, Any] = dict.fromkeys(layout, 0) | dict(plan.fields)
    fields |= {name: 0 if x is None else x.ctypes.data for name, x in zip(plan.pointers, arrays, strict=True)}
    offsets = launches.offsets()
    workspace = _poisoned(offsets[""].value(fields))
    regions = {name: workspace.ctypes.data + offset.value(fields) for name, offset in offsets.items() if name}
    choice = next(
        choice for choice in launches.choices if all(one.value(fields) for one in launches.conditions(choice))
    )
    for one in choice.passes:
        programs = one.grid.value(fields)
        if programs:
            arguments = {name: _argument(launches, name, fields, regions) for name in one.parameters}
            with np.errstate(all="ignore"):  # as a GPU does
                one.function[(programs,)](**arguments, **one.constants)


def _argument(launches, name: str, fields: Mapping[str, Any], regions: Mapping[str, int]) -> Any:
    """A parameter's value, of the type that it is compiled with."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    from qflash.triton.launches import HAS

    if name in regions:
        value = regions[name]
    elif name.startswith(HAS):
        value = int(fields[launches.field(name.removeprefix(HAS))] != 0)
    else:
        value = fields[launches.field(name)]
    told = launches.type_of(name)
    kind = tl.str_to_ty(told, None)
    numpy_type = np.uint64 if told.startswith("*") else {"fp32": np.float32, "i64": np.int64, "u64": np.uint64}.get(told)
    return tl.tensor(TensorHandle(np.array([value], numpy_type or np.int32), kind), kind)


def _poisoned(size: int) -> np.ndarray:
    """`size` bytes that read as NaN in every format of floats, aligned as a GPU's allocators align."""
    memory = np.full(size + 256, 0xFF, np.uint8)
    first = -memory.ctypes.data % 256
    return memory[first : first + size]


@lru_cache(maxsize=1)
def _mend() -> None:
    """Put right what the interpreter gets wrong, in this process."""
    import ml_dtypes
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(x.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)

    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    plain_binary, plain_patch = InterpreterBuilder.binary_op, interpreter._patch_lang_tensor

    def dot(self, a, b, *rest):
        return plain_dot(self, widened(a), widened(b), *rest)

    def cast(self, source, to):
        source = widened(source)
        if to.scalar == tl.bfloat16:
            return TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return plain_cast(self, source, to)

    def binary(self, left, right, operation):
        """A comparison has the type of a truth value, not of what is compared."""
        found = plain_binary(self, left, right, operation)
        return TensorHandle(found.data, tl.int1) if found.data.dtype == bool else found

    def patch(tensor, *rest):
        """An array of one number is a number, which newer NumPys no longer say."""
        plain_patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot, cast
    InterpreterBuilder.binary_op, interpreter._patch_lang_tensor = binary, patch
