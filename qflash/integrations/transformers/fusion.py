"""Fewer launches in a forward pass of an unmodified model: while a `Decoder` runs it, several small steps are computed
in one. Modules that are not recognized run unchanged.

Meanwhile a recognized module has a new class, derived from its own. A copy or pickle of it has the original class. An
attribute `forward` would be copied too, and would compute with the weights of the module it was made for.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation

from qflash.integrations.transformers.rotations import Rotations, class_as_made, paged_pass
from qflash.integrations.transformers.stand_ins import is_tanh_gelu, norm_eps, norm_weight

Tensor = torch.Tensor
Forward = Callable[..., Any]  # of a module and its arguments

_IN_STEPS = (NewGELUActivation, FastGELUActivation)  # GeLU with tanh, one elementwise launch per operation


class Fusion:
    """The recognized modules of a model, and their fused forwards."""

    def __init__(self, model: nn.Module) -> None:
        self._rotations = Rotations()
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._names: dict[str, list[str]] = {"rope": self._rotations.names, "rms_norm": [], "gelu": []}
        for name, module in model.named_modules():
            self._look_at(name, module)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The names of the fused modules, by kind of fusion: "rope", "rms_norm", "gelu"."""
        return {kind: tuple(found) for kind, found in self._names.items() if found}

    def _look_at(self, name: str, module: nn.Module) -> None:
        rotated = self._rotations.forward_of(name, module)
        if rotated is not None:
            self._forwards.append((module, rotated))
            return
        if isinstance(module, _IN_STEPS) and is_tanh_gelu(module):
            kind, forward = "gelu", _gelu
        elif (formula := norm_weight(module)) is not None:
            kind, forward = "rms_norm", _norm(formula == "1 + w")
        else:
            return
        self._names[kind].append(name)
        self._forwards.append((module, forward))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the model with these forwards. If another thread removes one meanwhile, the model's own forward runs,
        which computes the same. A module that has been given another forward since stays as it is."""
        placed: list[tuple[Any, Forward, Any, Any]] = []
        try:
            for module, forward in self._forwards:
                if "forward" not in vars(module) and module not in _forwards:
                    made = getattr(type(module), "_qflash_before", type(module))
                    placed.append((module, forward, made, _for_a_while(made)))
                    _forwards[module] = forward
                    module.__class__ = placed[-1][-1]
            yield
        finally:
            for module, forward, made, other in placed:
                if type(module) is other:
                    module.__class__ = made
                if _forwards.get(module) is forward:
                    del _forwards[module]

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A forward pass over pages, by this thread. In other threads, or in a `stream`, modules rotate q and k."""
        with paged_pass():
            try:
                yield
            finally:
                self._rotations.end_pass()


_forwards: WeakKeyDictionary[Any, Forward] = WeakKeyDictionary()
"""Forwards of the modules that are currently fused. They are not attributes, which would be copied with a module and
would change while another thread copies it."""


@cache
def _for_a_while(made: Any) -> Any:
    """A class derived from `made`, with its name, whose modules run the forward that `_forwards` has for them."""

    def forward(module: Any, /, *arguments: Any, **words: Any) -> Any:
        # A compiled model does not see the replaced globals of a copied function, and the compiler fuses by itself.
        # Modules of this class without an entry are copies made in other ways, such as the replicas of
        # torch.nn.DataParallel.
        fused = None if torch.compiler.is_compiling() else _forwards.get(module)
        return (made.forward if fused is None else fused)(module, *arguments, **words)

    def reduced(module: Any, protocol: Any) -> Any:
        """For pickle and copy: reduce the module as an instance of `made`."""
        plain = made.__new__(made)
        plain.__dict__ = dict(vars(module))
        function, arguments, *state = plain.__reduce_ex__(protocol)
        if function is copyreg.__newobj__:  # pickle accepts it only with the current class of `module`
            function = made.__new__
        return function, arguments, *state

    names = {name: getattr(made, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"forward": forward, "__reduce_ex__": reduced, "_qflash_before": made}
    names |= {"_qflash_as_made": getattr(made, "_qflash_as_made", made)}
    return type(made)(made.__name__, (made,), names)


def _gelu(_: nn.Module, input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def _norm(is_plus_one: bool) -> Forward:
    return lambda module, /, *arguments, **words: fused_norm(module, is_plus_one, *arguments, **words)


def fused_norm(module: Any, is_plus_one: bool, *arguments: Any, **words: Any) -> Any:
    """What an RMS norm recognized by `norm_weight` computes, in PyTorch's single kernel."""
    original, weight, eps = class_as_made(module).forward, module.weight, norm_eps(module)
    x = arguments[0] if arguments else None
    # A gate, say, or a shape that broadcasts: the module defines what that means. Also an eps that is no longer a
    # float, for which PyTorch's kernel would use its own default.
    if words or len(arguments) != 1 or not isinstance(x, Tensor) or x.shape[-1:] != weight.shape or eps is None:
        return original(module, *arguments, **words)
    if is_plus_one:  # the module computes in float32, so 1 + w is rounded in no other type
        return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
    # PyTorch's single kernel takes one dtype. Autocast may change that of x, but leaves float32 unchanged.
    if x.dtype is not weight.dtype or (x.dtype is not torch.float32 and torch.is_autocast_enabled(x.device.type)):
        return original(module, *arguments)
    return F.rms_norm(x, weight.shape, weight, eps)
