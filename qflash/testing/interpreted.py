"""Triton kernels on the CPU, in Triton's interpreter: the programs of the grid in sequence, each operation by NumPy.

Triton decides on import whether kernels are compiled or interpreted, so the interpreter has its own process, which is
started once and kept. `_mend` fixes errors of the interpreter of Triton 3.6: bfloat16, whose bits it multiplies and
which it rounds towards zero, comparisons of scalars, and the ends of loops with newer NumPys.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from qflash import _native, dispatch
from qflash.call.op import Plan
from qflash.call.spec import Spec
from qflash.testing.emulator import poisoned
from qflash.triton.launches import HAS, Choice, Launches

ARCH = 90  # what kernels are selected for: tiles and constants of Hopper, unless a test requests others
T = TypeVar("T")


def in_interpreter(function: Callable[..., T], *arguments: Any) -> T:
    """Call `function`, from a module that any process can import, in the process that interprets."""
    return _process().call(function, arguments)


class _Process:
    """Another Python, which calls functions that it is sent, in sequence."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from qflash.testing.interpreted import serve; serve()"]
        env = os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._lock = threading.Lock()

    def call(self, function: Callable[..., T], arguments: Sequence[Any]) -> T:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            pickle.dump((function, arguments), self._process.stdin)
            self._process.stdin.flush()
            found, error = pickle.load(self._process.stdout)
        if error is not None:
            raise error
        return found


@lru_cache(maxsize=1)
def _process() -> _Process:
    return _Process()


def serve() -> None:
    """Call the functions named on stdin, and write results or exceptions to stdout; printed output goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        found, error = None, None
        try:
            found = function(*arguments)
        except Exception as raised:
            error = _sendable(raised)
        pickle.dump((found, error), answers)
        answers.flush()


def _sendable(error: Exception) -> Exception:
    """The exception with its traceback as a note, or, if it cannot be pickled, a RuntimeError with the text."""
    told = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(told)
    error.add_note(told)
    return error


def launch(plan: Plan, arrays: Sequence[np.ndarray | None], arch: int = ARCH) -> dict[str, np.ndarray]:
    """Execute a plan: select the kernel as for a GPU, and interpret it. To be called in the interpreter's process.

    arrays: operands and results in the order of the plan, as the kernel takes them; None is a null pointer. Returns the
    final contents of the workspace's regions, as bytes.
    """
    spec = plan.spec(arch)
    fields = {**dict(plan.fields), **dict(zip(plan.pointers, arrays, strict=True))}
    return launch_struct(dispatch.choose(spec, plan.kernel).name, spec, plan.struct, fields)


def launch_struct(kernel: str, spec: Spec, struct: str, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The same with a C struct whose nonzero fields are all given, arrays for pointers."""
    from qflash.backends import triton as backend

    _mend()
    of = backend.launches(dispatch.BY_NAME[kernel], spec)
    _, layout = _native.op_layouts[struct]
    fields: dict[str, Any] = dict.fromkeys(layout, 0)
    fields |= {name: x.ctypes.data if isinstance(x, np.ndarray) else x or 0 for name, x in given.items()}
    offsets = [offset.value(fields) for offset in of.offsets().values()]
    workspace = poisoned(offsets[-1])
    parts = {
        region.name: workspace[begin:end] for region, (begin, end) in zip(of.regions, pairwise(offsets), strict=True)
    }
    choice = next(choice for choice in of.choices if all(one.value(fields) for one in of.conditions(choice)))
    for one in choice.passes:
        programs = one.grid.value(fields)
        if programs:
            arguments = {name: _argument(of, choice, name, fields, parts) for name in one.parameters}
            with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):  # as on a GPU
                one.function[(programs,)](**arguments, **one.constants)
    return parts


def _argument(
    of: Launches, choice: Choice, name: str, fields: Mapping[str, Any], parts: Mapping[str, np.ndarray]
) -> Any:
    """A parameter's value, in the type that it is compiled with."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if name in parts:
        value = parts[name].ctypes.data
    elif name.startswith(HAS):
        value = int(fields[of.field(name.removeprefix(HAS))] != 0)
    else:
        value = fields[of.field(name)]
    told = of.type_of(name, choice)
    kind = tl.str_to_ty(told, None)
    of_numpy = np.uint64 if told.startswith("*") else _NUMPY[told]
    return tl.tensor(TensorHandle(np.array([value], of_numpy), kind), kind)


_NUMPY = {"i32": np.int32, "i64": np.int64, "u64": np.uint64, "fp32": np.float32}


@lru_cache(maxsize=1)
def _mend() -> None:
    """Fix errors of the interpreter, in this process."""
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
        """A comparison returns a boolean type, not that of its operands."""
        found = plain_binary(self, left, right, operation)
        return TensorHandle(found.data, tl.int1) if found.data.dtype == bool else found

    def fma(self, x, y, z):
        """Rounded once."""
        exact = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    def patch(tensor, *rest):
        """A one-element array converts to an integer, which newer NumPys no longer allow."""
        plain_patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpreterBuilder.create_fma = dot, cast, fma
    InterpreterBuilder.binary_op, interpreter._patch_lang_tensor = binary, patch
