"""Types of the public calls, for your own annotations. Importing them imports no framework.

A call returns arrays of the type it is given, so a type checker infers that `qflash.attention` on torch tensors returns
a torch tensor (`ArrayT`). NumPy's array types include the dtype, so lse and statistics are float32 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

__all__ = [
    "Activation",
    "ArrayT",
    "DType",
    "Flag",
    "FrameworkArray",
    "Granularity",
    "Integer",
    "JaxArray",
    "Layout",
    "Lengths",
    "LinearPrecision",
    "Number",
    "NumpyT",
    "PageLayout",
    "Precision",
    "Reduction",
    "Rounding",
    "TensorT",
    "TorchTensor",
    "Window",
]


class FrameworkArray(Protocol):
    """What numpy.ndarray, torch.Tensor and jax.Array have in common. `__len__` excludes NumPy's scalars."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __len__(self) -> int: ...


class TorchTensor(FrameworkArray, Protocol):
    """torch.Tensor, identified by what only it has."""

    @property
    def requires_grad(self) -> bool: ...


class JaxArray(FrameworkArray, Protocol):
    """jax.Array, identified by what only it has."""

    @property
    def sharding(self) -> Any: ...


class _DTypeObject(Protocol):
    """What numpy.dtype and torch.dtype have in common."""

    @property
    def itemsize(self) -> int: ...


ArrayT = TypeVar("ArrayT", bound=FrameworkArray)
# For results of another dtype. NumPy's array types include the dtype, the others do not. No array matches two of these
# overloads, so NDArray[Any] resolves too.
NumpyT = TypeVar("NumpyT", bound=np.ndarray[Any, Any])
TensorT = TypeVar("TensorT", bound=TorchTensor | JaxArray)

if TYPE_CHECKING:
    from typing_extensions import TypeVar as _TypeVarWithDefault  # part of every type checker

    # For the classes that hold arrays. With the default, plain `Quantized` means arrays of any framework.
    ArrayT_co = _TypeVarWithDefault("ArrayT_co", bound=FrameworkArray, covariant=True, default=Any)
else:
    ArrayT_co = TypeVar("ArrayT_co", bound=FrameworkArray, covariant=True)

# NumPy's scalars are accepted like Python's.
Flag: TypeAlias = bool | np.bool_
Integer: TypeAlias = int | np.integer[Any]
Number: TypeAlias = float | np.floating[Any] | np.integer[Any]
Window: TypeAlias = Sequence[Integer]  # (left, right)
Lengths: TypeAlias = FrameworkArray | Sequence[Integer]  # lengths of sequences, int32

# A dtype's name ("bfloat16"), a scalar type (np.float16, jnp.bfloat16), or a dtype object (torch.bfloat16).
DType: TypeAlias = str | type[Any] | _DTypeObject

# The values that some arguments allow.
Layout: TypeAlias = Literal["bthd", "bhtd"]
PageLayout: TypeAlias = Literal["phtd", "pthd"]
Precision: TypeAlias = Literal["int8", "int8_fp8"]
Activation: TypeAlias = Literal["gelu", "gelu_tanh", "silu"]
LinearPrecision: TypeAlias = Literal["int8"]
Granularity: TypeAlias = Literal["tensor", "token", "group"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
Reduction: TypeAlias = Literal["mean", "sum", "none"]
