"""The static and the traced part of a call: the first determines the program, the second are its operands.

Every device runs the same program, and a device's part of a mask depends on which device it is. Where devices differ,
the program has one branch per kind of difference, and a device selects its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from qflash.frontends.jax.varying import vary_alike
from qflash.parallel.jax import maths
from qflash.parallel.parts import Sequences
from qflash.parallel.placement import Placement
from qflash.parallel.words import Words, check_gradients
from qflash.rotary import Rope

Facts = dict[str, Any]  # arrays that describe tokens, by name; none of them has a gradient
Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True)
class Static:
    """What a program is specialized on; hashable."""

    at: Placement
    words: Words
    axis: str
    longest: int
    interleaved: bool
    wide: bool

    @property
    def ranks(self) -> int:
        return self.at.ranks

    def rank(self) -> Any:
        """The index of this device: traced."""
        return jax.lax.axis_index(self.axis)

    def sequences(self, like: Any, facts: Facts) -> Sequences:
        """The call in the form that parts are made from."""
        rope = None
        if "cos" in facts:
            rope = Rope(facts["cos"], facts["sin"], self.interleaved, facts.get("positions_q"))
        return Sequences(
            self.at,
            self.words,
            maths,
            like,
            facts.get("kv_lens"),
            facts.get("offsets"),
            self.longest,
            rope,
            positions_k=facts.get("positions_k_of_all"),
            positions_q=facts.get("positions_q_of_all"),
            wide=self.wide,
        )

    def pass_on(self, tree: Any, distance: int = 1) -> Any:
        """The tree of the device `distance` before this one; this device's goes to the one `distance` after it."""
        pairs = [(rank, (rank + distance) % self.ranks) for rank in range(self.ranks)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)


def for_each_kind(static: Static, kinds: Sequence[Kind], function: Callable[[Kind], Any], like: Any) -> Any:
    """function(kind of this device). kinds: of every rank; equal ones share a branch. like: an array of the device:
    results of all branches vary over all mesh axes that it varies over."""
    distinct = list(dict.fromkeys(kinds))
    if len(distinct) == 1:
        return function(distinct[0])
    table = jnp.array([distinct.index(kind) for kind in kinds], jnp.int32)
    branches = [lambda kind=kind: _all_vary(function(kind), like) for kind in distinct]
    return jax.lax.switch(table[static.rank()], branches)


def _all_vary(results: Any, like: Any) -> Any:
    leaves, tree = jax.tree.flatten(results)
    return jax.tree.unflatten(tree, vary_alike([*leaves, like])[: len(leaves)])


def add_rows(total: Any, share: Any, axis: int, rows: tuple[int, int]) -> Any:
    """total with `share` added to some rows of one of its axes."""
    share = share.astype(total.dtype)
    if rows == (0, total.shape[axis]):
        return total + share
    return total.at[(slice(None),) * axis + (slice(*rows),)].add(share)


def saved_again(*arrays: Any) -> Any:
    """Arrays saved by a forward pass, for the backward pass: values derived from them are recomputed.

    Otherwise XLA would find that keys were already transferred or gathered, and keep all received keys of every layer.
    """
    return jax.lax.optimization_barrier(arrays)


def check_differentiable(static: Static) -> None:
    """Reject the gradient of a quantized precision."""
    check_gradients(static.words, "put jax.lax.stop_gradient around q, k and v")
