"""Types of the public calls, for annotations of one's own. No framework is imported to say them.

A call returns arrays of the kind it is given, so a type checker knows that `qflash.attention` on torch tensors returns
a torch tensor (`ArrayT`). Results of NumPy have the dtype in their type, so lse and statistics are float32 there.
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
    """What numpy.ndarray, torch.Tensor and jax.Array have in common. `__len__` tells them from NumPy's scalars."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __len__(self) -> int: ...


class TorchTensor(FrameworkArray, Protocol):
    """torch.Tensor, by what only it has."""

    @property
    def requires_grad(self) -> bool: ...


class JaxArray(FrameworkArray, Protocol):
    """jax.Array, by what only it has."""

    @property
    def sharding(self) -> Any: ...


class _DTypeObject(Protocol):
    """What numpy.dtype and torch.dtype have in common."""

    @property
    def itemsize(self) -> int: ...


ArrayT = TypeVar("ArrayT", bound=FrameworkArray)
# For results of another dtype. NumPy's arrays have their dtype in their type, and the others do not; signatures that
# no array fits two of give an answer for NDArray[Any] as well.
NumpyT = TypeVar("NumpyT", bound=np.ndarray[Any, Any])
TensorT = TypeVar("TensorT", bound=TorchTensor | JaxArray)

if TYPE_CHECKING:
    from typing_extensions import TypeVar as _TypeVarWithDefault  # part of every type checker

    # Of the classes that hold arrays. The default lets one write `Quantized` for those of any framework.
    ArrayT_co = _TypeVarWithDefault("ArrayT_co", bound=FrameworkArray, covariant=True, default=Any)
else:
    ArrayT_co = TypeVar("ArrayT_co", bound=FrameworkArray, covariant=True)

# NumPy's scalars are as good as Python's.
Flag: TypeAlias = bool | np.bool_
Integer: TypeAlias = int | np.integer[Any]
Number: TypeAlias = float | np.floating[Any] | np.integer[Any]
Window: TypeAlias = Sequence[Integer]  # (left, right)
Lengths: TypeAlias = FrameworkArray | Sequence[Integer]  # of sequences, int32

# A dtype's name ("bfloat16"), a scalar type (np.float16, jnp.bfloat16), or a dtype object (torch.bfloat16).
DType: TypeAlias = str | type[Any] | _DTypeObject

# The words that some arguments allow.
Layout: TypeAlias = Literal["bthd", "bhtd"]
PageLayout: TypeAlias = Literal["phtd", "pthd"]
Precision: TypeAlias = Literal["int8", "int8_fp8"]
Activation: TypeAlias = Literal["gelu", "gelu_tanh", "silu"]
LinearPrecision: TypeAlias = Literal["int8"]
Granularity: TypeAlias = Literal["tensor", "token", "group"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
Reduction: TypeAlias = Literal["mean", "sum", "none"]
