"""Op and Plan: what an operation is to the front ends, and what one call of it comes down to.

Each operation has one pure function from described arrays and the user's words to a `Plan`, or to an error that names
the argument. A Plan has no address and no array in it; front ends carry it out, each in its framework.
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
    """An array the kernel reads: which argument, where its address goes, and what becomes of it first."""

    argument: str
    field: str
    contiguous: bool = False  # the kernel reads it without gaps
    dtype: str | None = None  # None: as it is. int32 from int64 saturates, so that no bad value becomes a good one
    written: bool = False  # the kernel writes to it, too: it is taken as it is, because a copy would be lost

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
    """A size that is not known before a program runs: the product of extents of its arrays, (argument, dimension).

    ~dimension stands for one less than that extent: n + 1 offsets are those of n sequences.
    """

    of: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked call."""

    for_spec: Spec  # what selects the kernel, but for arch, which is the device's
    device: str  # with its index: "cuda:1"
    kernel: str | None  # asked for by name
    struct: str  # the C struct, of csrc/include
    fields: tuple[tuple[str, int | float | Extents], ...]  # all but pointers, and but what is 0
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    zeros: bool = False  # there is nothing to read, every result is 0, and operands stay as they are
    bounds: tuple[tuple[str, str, int], ...] = ()  # (field, argument, dimension): the field is at most that extent

    def spec(self, arch: int) -> Spec:
        """What selects the kernel, for a device of compute capability `arch`/10 (0: CPU)."""
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
        """No result has an element, or all are known to be 0; nor does the kernel write to an operand."""
        return self.zeros or (not self.written and all(0 in result.shape for result in self.results))

    def params(self) -> bytes:
        """The struct with null pointers; sizes that are not known yet are 0."""
        size, fields = _native.op_layouts[self.struct]
        packed = bytearray(size)
        for name, value in (("struct_bytes", size), *self.fields):
            if not isinstance(value, Extents):
                offset, kind = fields[name]
                struct.pack_into(kind, packed, offset, value)
        return bytes(packed)


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """How reverse mode goes through an operation.

    `op` takes the cotangents of all results, "d" before their names (None: zero; the first is always there), then those
    arrays and results of the operation that it names; nothing else is kept for it. It has the operation's words, and
    returns the gradients of the arrays in `of` that are there. `words`: with them, results are the first of
    `Op.results`. The gradient of an array in `passed` is the cotangent of the first result, as it is.

    None: the operation is linear and orthogonal in its first array, and so its own gradient. That takes the cotangent
    of its one result in the place of this array, and the flag that `flips` names the other way round. It can be
    differentiated again.
    """

    op: Op | None
    of: tuple[str, ...]
    words: Mapping[str, Any] = field(
        default_factory=dict
    )  # what the forward call must say, so that all results are there
    refused: tuple[str, ...] = ()  # arrays whose gradient somebody may want and nobody has
    flips: str = ""
    passed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)  # one object each, so that a look-up need not hash what is in it
class Op:
    """An operation as front ends know it: its arrays, its other words, and the function that plans a call."""

    name: str
    arrays: tuple[str, ...]  # in order; the first is never None
    words: tuple[str, ...]
    plan: Callable[..., Plan]  # (one Array or None for each of `arrays`, one value for each of `words`)
    results: tuple[str, ...] = ()  # their names, where gradients or dimensions are told by them
    # Arrays that calls write to, in the order of `arrays`. Such an operation is called by `run_in_place`, and has no
    # gradient: NumPy and PyTorch change the arrays, JAX returns new ones, which may have the memory of the old.
    writes: tuple[str, ...] = ()
    # Whether a call with these arrays mapped by vmap is one call, in which they and all results have one dimension
    # more, the first. Given the names, the rank of each array in the eyes of one sample, and the words by name.
    folds: Callable[[Collection[str], dict[str, int], dict[str, Any]], bool] = lambda *_: False
    # The dimensions of arrays and results by letters, given the ranks of those arrays that are there. "b", where all
    # that have it are independent, takes vmap's dimension and may be split over devices; "H" and "G", query and key
    # heads, too. A result without "b" is a sum over the batch, or has none: it then stays together. Other capitals are
    # rows and columns, each of which may be split; a result without such a letter is a sum over it. None: not told.
    dims: Callable[[Mapping[str, int]], Mapping[str, str] | None] | None = None
    checked: tuple[str, ...] = ()  # arrays of which the CPU kernel refuses some values
    indices: tuple[str, ...] = ()  # lengths and positions, which may be given as ints on the host
    autocast: tuple[str, ...] = ()  # arrays that torch.autocast casts
    tables: tuple[str, ...] = ()  # arrays of which a call takes one for all of its batch: vmap over them is a loop
    gradient: Gradient | None = None  # None: forward only
    no_gradient: str = ""  # where the user did not ask for it by name: what to say when its gradient is wanted
    public: str = ""  # what users call it; "": by its name
    kernels_of: str = ""  # the operation, as KERNELS names it, whose kernels compute it; "": that of its name
    # Of its products of matrices, from arrays and words by name, and a function that reads an array of ints if it can.
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
        """What `backward` calls the cotangents of its results."""
        return self.arrays[:1] if self.backward is self else tuple(f"d{name}" for name in self.results)

    def backward_words(self, words: Sequence[Any]) -> tuple[Any, ...]:
        """The words of `backward`."""
        assert self.gradient is not None
        flips = self.gradient.flips
        return self.with_words(words, {flips: not words[self.words.index(flips)]}) if flips else tuple(words)

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The arrays that are there, by name."""
        return {name: x for name, x in zip(self.arrays, arrays, strict=True) if x is not None}

    def sums_batch(self, dims: Mapping[str, str]) -> bool:
        """Whether a result that is there, by `dims`, is a sum over the batch."""
        return any("b" not in dims[name] for name in self.results if name in dims)

    def written(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arrays that are there and written to."""
        given = self.named(arrays)
        return tuple(given[name] for name in self.writes if name in given)

    def with_words(self, words: Sequence[Any], changes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The words with some of them changed."""
        return tuple(changes.get(name, word) for name, word in zip(self.words, words, strict=True))
