"""A time model of a layer of attention over many GPUs, from its arithmetic, its bytes and the rates of both.

It counts what `qflash.parallel` computes and sends under each strategy, and divides by given rates: measured ones for
arithmetic (`MeasuredRates`, from result rows), and those of links and memory from the caller. It models no latency, no
congestion and no throttled clocks; `ASSUMPTIONS` lists the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from qflash.parallel.placement import Placement
from qflash.parallel.rounds import Round, rounds_of
from qflash.parallel.words import STRATEGIES

FORWARD, BACKWARD = "forward", "backward"
KINDS = (FORWARD, BACKWARD)
_PRODUCTS = {FORWARD: 2, BACKWARD: 5}  # matrix products; two operations per pair of numbers
_FLOAT32 = 4

ASSUMPTIONS = (
    "Every call has enough rows and heads to fill a GPU, as those had that arithmetic was measured with.",
    "Tokens are placed by zigzag where the mask is causal, so that every GPU computes the same.",
    "A ring's transfer runs under the computation before it and takes nothing from it: the longer of the two counts.",
    "A round of a ring is one call, also where a causal mask makes it two for some GPUs.",
    "Gathering and exchanging are waited for. Backward gathers again, and sums gradients of keys in float32.",
    "A ring that leaves a node moves at the network's rate throughout, and so do collectives over several nodes.",
    "Every GPU has the whole rate of its link either way. Latency, and small messages that get less, are left out.",
    "Merging, adding up and copying run at the rate of memory, beside which nothing else runs.",
)


@dataclass(frozen=True)
class Layer:
    """A layer of attention on one sequence, or on `batch` of them."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    number_bytes: int = 2
    batch: int = 1
    precision: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its passes. Quantized attention has no gradients."""
        return KINDS if self.precision is None else (FORWARD,)

    @property
    def ring_bytes(self) -> float:
        """Bytes per element of k or v in a ring: if quantized, an integer and its share of a token's scale."""
        return self.number_bytes if self.precision is None else 1 + _FLOAT32 / self.head_dim

    def operations(self, kind: str) -> float:
        """Operations of all GPUs together, in the matrix products that the mask leaves."""
        scores = self.batch * self.q_heads * float(self.tokens) ** 2 * (0.5 if self.causal else 1.0)
        return 2 * _PRODUCTS[kind] * scores * self.head_dim

    def numbers(self, tokens: float, heads: float) -> float:
        """The number of elements of an array like q, k or v."""
        return self.batch * tokens * heads * self.head_dim


@dataclass(frozen=True)
class Machine:
    """Rates in bytes per second: of a GPU's link within its node and to other nodes, one way, and of its memory."""

    link: float
    network: float
    memory: float
    node: int = 8  # GPUs joined by the link

    def rate(self, gpus: int) -> float:
        """The rate between this many GPUs: the lowest one on the path."""
        return self.link if gpus <= self.node else min(self.link, self.network)


class Rates(Protocol):
    """The rate of arithmetic."""

    def operations(self, kind: str, length: int, causal: bool) -> float:
        """Operations per second in a call with `length` queries and keys."""


@dataclass(frozen=True)
class FixedRate:
    """The same rate for every call."""

    rate: float

    def operations(self, kind: str, length: int, causal: bool) -> float:
        return self.rate


@dataclass(frozen=True)
class MeasuredRates:
    """Rates from result rows, by kind and mask: (length, operations per second), from short to long."""

    rates: Mapping[tuple[str, bool], tuple[tuple[int, float], ...]]

    @classmethod
    def of_rows(
        cls, rows: Iterable[Mapping[str, Any]], head_dim: int, dtype: str, precision: str | None = None
    ) -> MeasuredRates:
        """From the fastest kernel of qflash for each row's problem, with equally many queries and keys."""
        best: dict[tuple[str, bool], dict[int, float]] = {}
        for row in rows:
            fits = row.get("kernel") and row.get("D") == head_dim and row.get("dtype") == dtype
            if not fits or row.get("precision") != (precision or "native") or row.get("Tq") != row.get("Tk"):
                continue
            if precision and row["candidate"] != f"qflash {row['kernel']}":  # without the quantization pass
                continue
            if row.get("kind") in KINDS and row.get("gflops") and not row.get("kv_lens"):
                of = best.setdefault((row["kind"], bool(row["causal"])), {})
                of[row["Tq"]] = max(of.get(row["Tq"], 0.0), 1e9 * row["gflops"])
        return cls({key: tuple(sorted(of.items())) for key, of in best.items()})

    def operations(self, kind: str, length: int, causal: bool) -> float:
        """The rate at the length nearest by ratio; beyond the last length, the rate there."""
        return self._nearest(kind, length, causal)[1]

    def measured_length(self, kind: str, length: int, causal: bool) -> int:
        """The measured length that represents this one."""
        return self._nearest(kind, length, causal)[0]

    def _nearest(self, kind: str, length: int, causal: bool) -> tuple[int, float]:
        known = self.rates.get((kind, causal))
        if not known:
            raise LookupError(f"there is no row of kind {kind!r} with causal {causal}")
        return min(known, key=lambda one: abs(math.log(one[0] / max(length, 1))))


@dataclass(frozen=True)
class Pass:
    """One pass over a layer on one GPU, in seconds and bytes."""

    computing: float
    moved_bytes: float
    moving: float  # the time of transfers alone
    waiting: float  # the part of it that computation does not hide
    copying: float  # merges, sums and copies, at memory bandwidth

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting + self.copying


@dataclass(frozen=True)
class Estimate:
    """A strategy on some number of GPUs. If `why_not` is not empty, the strategy does not support this layer."""

    strategy: str
    gpus: int
    passes: Mapping[str, Pass]
    keys_bytes: float = 0.0  # keys and values that a GPU holds at a time, forward
    why_not: str = ""

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.passes.values())


def estimate(layer: Layer, gpus: int, strategy: str, machine: Machine, rates: Rates) -> Estimate:
    """The time of a layer's passes, forward and backward."""
    why_not = _why_not(layer, gpus, strategy)
    if why_not:
        return Estimate(strategy, gpus, {}, why_not=why_not)
    count = _alone if gpus == 1 else _PASSES[strategy]
    passes = {kind: count(layer, gpus, kind, machine, rates) for kind in layer.kinds}
    held = {"ring": _held(layer, gpus), "all_gather": 1.0, "ulysses": _repeated(layer, gpus) / layer.kv_heads / gpus}[
        strategy
    ]
    return Estimate(strategy, gpus, passes, held * 2 * layer.numbers(layer.tokens, layer.kv_heads) * layer.number_bytes)


def estimates(layer: Layer, gpus: int, machine: Machine, rates: Rates) -> list[Estimate]:
    """Estimates of all strategies."""
    return [estimate(layer, gpus, strategy, machine, rates) for strategy in STRATEGIES]


def hidden_from(layer: Layer, machine: Machine, gpus: int, rate: float) -> float:
    """The number of tokens per GPU from which a step of a ring takes longer than its transfer, at this arithmetic rate.

    A step computes 4 T² Hq D operations, or half, and moves 2 T Hkv D numbers.
    """
    half = 0.5 if layer.causal else 1.0
    bytes_per_token = 2 * layer.kv_heads * layer.head_dim * layer.ring_bytes
    operations_per_token = 4 * half * layer.q_heads * layer.head_dim
    return bytes_per_token / machine.rate(gpus) * rate / operations_per_token


def _why_not(layer: Layer, gpus: int, strategy: str) -> str:
    parts = (2 if layer.causal else 1) * gpus
    if layer.tokens % parts:
        return f"{layer.tokens} tokens do not make {parts} chunks"
    if strategy != "ulysses":
        return ""
    if layer.q_heads % gpus:
        return f"{layer.q_heads} heads of q do not divide over {gpus} GPUs"
    if layer.kv_heads % gpus and gpus % layer.kv_heads:
        return f"{layer.kv_heads} heads of k do not divide over {gpus} GPUs, nor these over the heads"
    return ""


def _held(layer: Layer, gpus: int) -> float:
    """The share of all keys that a GPU holds at a time in a ring: those of a round and of the next one and, if a round
    has several hops, a concatenated copy of one."""
    longest = max(len(one.hops) for one in _rounds(layer, gpus))
    return (min(2, gpus) if longest == 1 else 3 * longest) / gpus


def _rounds(layer: Layer, gpus: int) -> list[Round]:
    return rounds_of(gpus, Placement("contiguous", gpus, layer.tokens))


def _repeated(layer: Layer, gpus: int) -> int:
    """The number of heads of k that ulysses sends: a head needed by several GPUs is sent to each of them."""
    return max(layer.kv_heads, gpus)


def _alone(layer: Layer, gpus: int, kind: str, machine: Machine, rates: Rates) -> Pass:
    """A single call of attention."""
    return Pass(layer.operations(kind) / rates.operations(kind, layer.tokens, layer.causal), 0.0, 0.0, 0.0, 0.0)


def _ring(layer: Layer, gpus: int, kind: str, machine: Machine, rates: Rates) -> Pass:
    part = layer.tokens // gpus
    operations = layer.operations(kind) / gpus**2  # per step
    own = operations / rates.operations(kind, part, layer.causal)
    other = operations / rates.operations(kind, part, False)
    keys = 2 * layer.numbers(part, layer.kv_heads)
    # In the backward pass the gradients of a block follow it, and move one hop further.
    hop = keys * (layer.ring_bytes + (0 if kind == FORWARD else _FLOAT32))
    last = 0.0 if kind == FORWARD else keys * _FLOAT32
    rate = machine.rate(gpus)
    waiting = last / rate
    if kind == BACKWARD:
        waiting += (gpus - 1) * max(hop / rate - other, 0.0)
    else:  # a round moves during the calls of the previous one
        for before, one in pairwise(_rounds(layer, gpus)):
            waiting += max(len(one.hops) * hop / rate - len(before.hops) * other, 0.0)
    moved = (gpus - 1) * hop + last
    return Pass(
        own + (gpus - 1) * other, moved, moved / rate, waiting, _ring_copies(layer, gpus, kind) / machine.memory
    )


def _ring_copies(layer: Layer, gpus: int, kind: str) -> float:
    """Bytes read and written by merges, or by sums of gradients."""
    part = layer.tokens // gpus
    # Under a causal mask half of the steps have all rows of q and half of the keys, the others half of q and all keys.
    share = 0.75 if layer.causal else 1.0
    rows, keys = (share * layer.numbers(part, heads) for heads in (layer.q_heads, layer.kv_heads))
    add = _added(layer)
    if kind == FORWARD:
        if layer.precision is not None:  # one call per hop, whose keys are converted before
            block = 2 * layer.numbers(part, layer.kv_heads)
            return (gpus - 1) * (rows * add + block * (layer.ring_bytes + layer.number_bytes))
        rounds = _rounds(layer, gpus)[1:]
        copied = sum(len(one.hops) for one in rounds if len(one.hops) > 1)  # concatenated
        return len(rounds) * rows * add + copied * 2 * keys * 2 * layer.number_bytes
    delta = 2 * rows * layer.number_bytes  # dout · out, which every step computes anew
    return gpus * (rows * add + 2 * keys * add + delta)


def _added(layer: Layer) -> int:
    """Bytes per element added to a sum: the sum is read and written, and the share is read."""
    return 2 * _FLOAT32 + layer.number_bytes


def _all_gather(layer: Layer, gpus: int, kind: str, machine: Machine, rates: Rates) -> Pass:
    computing = layer.operations(kind) / gpus / rates.operations(kind, layer.tokens, layer.causal)
    keys = 2 * layer.numbers(layer.tokens, layer.kv_heads)
    each = layer.number_bytes + (0 if kind == FORWARD else _FLOAT32)  # gradients of keys are summed in float32
    moved = keys * each * (gpus - 1) / gpus
    moving = moved / machine.rate(gpus)
    copied = 2 * keys * each  # reordered into token order
    if kind == BACKWARD:
        copied += keys * _added(layer)
    return Pass(computing, moved, moving, moving, copied / machine.memory)


def _ulysses(layer: Layer, gpus: int, kind: str, machine: Machine, rates: Rates) -> Pass:
    computing = layer.operations(kind) / gpus / rates.operations(kind, layer.tokens, layer.causal)
    heads = 2 * layer.q_heads + 2 * _repeated(layer, gpus)  # q, k and v, and out back; the reverse in the backward pass
    numbers = layer.numbers(layer.tokens / gpus, heads)
    moved = numbers * layer.number_bytes * (gpus - 1) / gpus
    moving = moved / machine.rate(gpus)
    return Pass(computing, moved, moving, moving, 4 * numbers * layer.number_bytes / machine.memory)  # on both sides


_PASSES = {"ring": _ring, "all_gather": _all_gather, "ulysses": _ulysses}
