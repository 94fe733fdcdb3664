"""Op and Plan: an operation as front ends use it, and one checked call of it.

Each operation has one pure function from array descriptions and the user's other arguments to a `Plan`, or to an error
that names the argument. A Plan contains no address and no array; each front end executes it in its framework.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qflash import _native
from qflash.call.spec import Spec

Read = Callable[[Any], list[int] | None]


@dataclass(frozen=True, slots=True)
class Operand:
    """An array the kernel reads: its argument, the field for its address, and how it is converted first."""

    argument: str
    field: str
    contiguous: bool = False  # the kernel requires it without gaps
    dtype: str | None = None  # None: unchanged. int64 saturates to int32, so that no invalid value becomes valid
    written: bool = False  # the kernel also writes to it: it is never copied, because the writes would be lost

    def __post_init__(self) -> None:
        if self.written and (self.contiguous or self.dtype is not None):
            raise ValueError(f"{self.argument} is written and would be converted; allowed: an array as it is")


@dataclass(frozen=True, slots=True)
class Result:
    """An array the kernel writes, contiguous."""

    field: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Extents:
    """A size that is unknown before a program runs: the product of extents of its arrays, (argument, dimension).

    ~dimension means that extent minus one: n + 1 offsets describe n sequences.
    """

    of: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked call."""

    for_spec: Spec  # selects the kernel; without arch, which depends on the device
    device: str  # with its index: "cuda:1"
    kernel: str | None  # requested by name
    struct: str  # the C struct, in csrc/include
    fields: tuple[tuple[str, int | float | Extents], ...]  # all except pointers and zeros
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    zeros: bool = False  # nothing is read, every result is 0, and operands do not change
    bounds: tuple[tuple[str, str, int], ...] = ()  # (field, argument, dimension): the field is at most that extent

    def spec(self, arch: int) -> Spec:
        """The Spec that selects the kernel, for a device of compute capability `arch`/10 (0: CPU)."""
        return replace(self.for_spec, arch=arch)

    @property
    def pointers(self) -> tuple[str, ...]:
        """The struct's pointers in the order calls take addresses: operands, then results."""
        return (*(operand.field for operand in self.operands), *(result.field for result in self.results))

    @property
    def written(self) -> tuple[Operand, ...]:
        """The operands that the kernel writes to, in order."""
        return tuple(operand for operand in self.operands if operand.written)

    @property
    def nothing_to_do(self) -> bool:
        """No result has elements or all are known to be 0, and the kernel writes to no operand."""
        return self.zeros or (not self.written and all(0 in result.shape for result in self.results))

    def params(self) -> bytes:
        """The struct with null pointers; sizes that are still unknown are 0."""
        size, fields = _native.op_layouts[self.struct]
        packed = bytearray(size)
        for name, value in (("struct_bytes", size), *self.fields):
            if not isinstance(value, Extents):
                offset, kind = fields[name]
                struct.pack_into(kind, packed, offset, value)
        return bytes(packed)


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """How reverse mode differentiates an operation.

    `op` takes the cotangents of all results, named with a "d" in front (None: zero; the first is always given), then
    those arrays and results of the operation that it names; nothing else is saved for it. It has the operation's words,
    and returns the gradients of those arrays in `of` that are given. `words`: with them, a call's results are the first
    of `Op.results`. The gradient of an array in `passed` is the cotangent of the first result, unchanged.

    None: the operation is linear and orthogonal in its first array, and so its own gradient. That call takes the
    cotangent of its one result instead of this array, and inverts the flag named by `flips`. It can be differentiated
    again.
    """

    op: Op | None
    of: tuple[str, ...]
    words: Mapping[str, Any] = field(
        default_factory=dict
    )  # the forward call's words with which all results are returned
    refused: tuple[str, ...] = ()  # arrays without a gradient that users may request one for
    flips: str = ""
    passed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, so that a lookup does not hash its contents
class Op:
    """An operation as front ends use it: its arrays, its words, and the function that plans a call."""

    name: str
    arrays: tuple[str, ...]  # in order; the first is never None
    words: tuple[str, ...]
    plan: Callable[..., Plan]  # (one Array or None for each of `arrays`, one value for each of `words`)
    results: tuple[str, ...] = ()  # their names, if gradients or dimensions refer to them
    # Arrays that calls write to, in the order of `arrays`. Such an operation is called by `run_in_place` and has no
    # gradient: NumPy and PyTorch modify the arrays, JAX returns new ones, which may reuse the memory of the old.
    writes: tuple[str, ...] = ()
    # Whether a call with these arrays mapped by vmap is one call, in which they and all results have one additional
    # dimension, the first. Takes the names, the rank of each array in one sample, and the words by name.
    folds: Callable[[Collection[str], dict[str, int], dict[str, Any]], bool] = lambda *_: False
    # The dimensions of arrays and results as letters, given the ranks of the given arrays. "b" is a dimension along
    # which all arrays that have it are independent; it absorbs vmap's dimension and may be sharded over devices, and so
    # may "H" and "G", query and key heads. A result without "b" is a sum over the batch, or has none: the batch is then
    # not sharded. Other capitals are rows and columns, each of which may be sharded; a result without such a letter is
    # a sum over it. None: not specified.
    dims: Callable[[Mapping[str, int]], Mapping[str, str] | None] | None = None
    checked: tuple[str, ...] = ()  # arrays in which the CPU kernel rejects some values
    indices: tuple[str, ...] = ()  # lengths and positions, accepted as ints on the host
    autocast: tuple[str, ...] = ()  # arrays that torch.autocast casts
    tables: tuple[str, ...] = ()  # arrays that a call has once for its whole batch: vmap over them is a loop
    gradient: Gradient | None = None  # None: forward only
    no_gradient: str = ""  # for operations that users do not call by name: the error when their gradient is requested
    public: str = ""  # the name users know; "": its name
    kernels_of: str = ""  # the operation in KERNELS whose kernels compute it; "": the one with its name
    # FLOPs of its matrix products, from arrays and words by name, and a function that reads an array of ints if it can.
    flops: Callable[[dict[str, Any], dict[str, Any], Read], int] | None = None

    @property
    def computed_as(self) -> str:
        """The operation whose rows of KERNELS compute it."""
        return self.kernels_of or self.name

    @property
    def spoken(self) -> str:
        """Its name in messages."""
        return f"qflash.{self.public or self.name}"

    @property
    def backward(self) -> Op:
        """The operation that computes its gradients."""
        assert self.gradient is not None
        return self.gradient.op or self

    @property
    def cotangents(self) -> tuple[str, ...]:
        """The names that `backward` has for the cotangents of its results."""
        return self.arrays[:1] if self.backward is self else tuple(f"d{name}" for name in self.results)

    def backward_words(self, words: Sequence[Any]) -> tuple[Any, ...]:
        """The words of `backward`."""
        assert self.gradient is not None
        flips = self.gradient.flips
        return self.with_words(words, {flips: not words[self.words.index(flips)]}) if flips else tuple(words)

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The given arrays, by name."""
        return {name: x for name, x in zip(self.arrays, arrays, strict=True) if x is not None}

    def sums_batch(self, dims: Mapping[str, str]) -> bool:
        """Whether one of the results in `dims` is a sum over the batch."""
        return any("b" not in dims[name] for name in self.results if name in dims)

    def written(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The given arrays that are written to."""
        given = self.named(arrays)
        return tuple(given[name] for name in self.writes if name in given)

    def with_words(self, words: Sequence[Any], changes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The words with some of them changed."""
        return tuple(changes.get(name, word) for name, word in zip(self.words, words, strict=True))
