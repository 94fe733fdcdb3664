"""fuse_layers: what a model computes between its products in many small steps, in one each, forward and backward.

A module that is recognised gets a class of its own, which is made of the class it had and has another forward. An
attribute `forward` would be bound to one module: copies of it, pickled ones and the replicas of
torch.nn.DataParallel would compute with its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

import qflash
from qflash.integrations.transformers.fusion import fused_norm
from qflash.integrations.transformers.joined import is_plain_linear
from qflash.integrations.transformers.rotations import NAME, class_as_made, fits, has_halves, rotation_of, with_global
from qflash.integrations.transformers.stand_ins import is_swiglu, norm_weight

Tensor = torch.Tensor
Forward = Callable[..., Any]

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda")


def fuse_layers(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Compute rotary embeddings by `qflash.rope`, MLPs of Llama by `qflash.swiglu` and RMS norms by PyTorch's own
    kernel, for good. It is meant for training, where these steps take longer than attention does.

    Parameters, their names and gradients are as before, and results are within rounding. What is recognised is found
    out by trying it on small arrays. Everything else runs as it was made: layers with hooks, layers that somebody
    replaces later, tensors that qflash does not take (float64, subclasses), forward-mode differentiation, and calls
    under autocast, but for RMS norms of float32. `qflash.swiglu` has no second derivative. On a GPU the tables of a
    rotation are looked at once: where later ones have two angles for a pair of channels, the results are NaN.

    A module keeps its type's name and is an instance of that type; it can be copied, pickled and replicated. A
    `Decoder` fuses by itself what pays there: give it a model that was not changed.

    Returns:
        The names of the modules that are fused, by what is: "rope", "swiglu", "rms_norm".

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from qflash.integrations.transformers import fuse_layers
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4)
        >>> fused = fuse_layers(LlamaForCausalLM(config))
        >>> fused["rope"], fused["swiglu"], len(fused["rms_norm"])
        (('model.layers.0.self_attn',), ('model.layers.0.mlp',), 3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; allowed: a torch.nn.Module")
    found: dict[str, list[str]] = {"rope": [], "swiglu": [], "rms_norm": []}
    for name, module in model.named_modules():
        if (known := _known(module)) is not None:
            kind, detail = known
            module.__class__ = _fused(type(module), kind)
            module._qflash_detail = detail
            found[kind].append(name)
    return {kind: tuple(names) for kind, names in found.items() if names}


def _known(module: nn.Module) -> tuple[str, Any] | None:
    """What a module is, and what its forward has to know for that."""
    if type(module) is not class_as_made(module):  # it is fused
        return None
    if (rotation := rotation_of(module)) is not None:
        return "rope", _Rotating(type(module), rotation[1])
    if (known := _tried(module)) is None:
        return None
    other = copy.copy(module)
    other.training = not module.training
    return known if _tried(other) == known else None


def _tried(module: nn.Module) -> tuple[str, Any] | None:
    """What a module is in the mode that it is in, training or not."""
    if not any(map(_is_hooked, module.children())) and is_swiglu(module):
        return "swiglu", type(module.act_fn)
    if (formula := norm_weight(module)) is not None:
        return "rms_norm", formula == "1 + w"
    return None


@cache
def _fused(made: Any, kind: str) -> Any:
    """A class like `made`, of its name, that runs in fewer steps."""
    run, original = _FORWARDS[kind], made.forward

    @wraps(original)
    def forward(module: Any, *arguments: Any, **words: Any) -> Any:
        # Somebody may have given the class another forward since.
        return (run if made.forward is original else made.forward)(module, *arguments, **words)

    def reduced(module: Any, protocol: Any) -> Any:
        """For pickle and copy, which look for a class by its name and would find the one it was made of."""
        function, arguments, *state = super(fused, module).__reduce_ex__(max(int(protocol), 2))
        return (_new, (made, kind), *state) if arguments == (fused,) else (function, arguments, *state)

    names = {name: getattr(made, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"forward": forward, "__reduce_ex__": reduced, "_qflash_as_made": made}
    fused = type(made)(made.__name__, (made,), names)
    return fused


def _new(made: Any, kind: str) -> Any:
    """A fused module that is yet to get its state."""
    fused = _fused(made, kind)
    return fused.__new__(fused)


def _attention(module: Any, *arguments: Any, **words: Any) -> Any:
    # A compiled model finds nothing in the globals of a copied function.
    is_as_made = torch.compiler.is_compiling() or not module._qflash_detail.is_valid()
    forward = class_as_made(module).forward if is_as_made else module._qflash_detail.forward
    return forward(module, *arguments, **words)


def _swiglu(mlp: Any, *arguments: Any, **words: Any) -> Any:
    gate, up, act = mlp.gate_proj, mlp.up_proj, mlp.act_fn
    is_known = len(arguments) == 1 and not words and is_plain_linear(gate) and is_plain_linear(up)
    if not is_known or type(act) is not mlp._qflash_detail or any(map(_is_hooked, (gate, up, act))):
        return class_as_made(mlp).forward(mlp, *arguments, **words)
    weights = gate.weight, up.weight, gate.bias, up.bias
    # An output of one column broadcasts in PyTorch.
    if gate.weight.shape != up.weight.shape or not _is_served(*arguments, *(x for x in weights if x is not None)):
        return class_as_made(mlp).forward(mlp, *arguments)
    return mlp.down_proj(qflash.swiglu(*arguments, gate.weight.T, up.weight.T, gate.bias, up.bias))


def _norm(module: Any, *arguments: Any, **words: Any) -> Any:
    return fused_norm(module, module._qflash_detail, *arguments, **words)


_FORWARDS: dict[str, Forward] = {"rope": _attention, "swiglu": _swiglu, "rms_norm": _norm}


class _Rotating:
    """The forward of an attention class with `_Rotation` in it. Each module has one, and a copy of a module another."""

    def __init__(self, made: Any, form: str) -> None:
        self._made, self._form = made, form
        self._rotate = made.forward.__globals__[NAME]
        self.forward = with_global(made.forward, NAME, _Rotation(self._rotate, form))

    def is_valid(self) -> bool:
        """Whether the class rotates as it did: somebody may have given its file another function."""
        return self._made.forward.__globals__.get(NAME) is self._rotate

    def __reduce__(self) -> Any:
        return _Rotating, (self._made, self._form)


class _Rotation:
    """Stands in the place of the function that an attention module rotates q and k by."""

    def __init__(self, rotate: Forward, form: str) -> None:
        self._rotate, self._form = rotate, form
        self._keeps_type = _keeps_type(rotate, form)
        self._had_halves: bool | None = None  # not looked at yet

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **words: Any) -> Any:
        is_known = not (more or words) and fits(q, k, cos, sin, self._form) and q.numel()
        if not (is_known and _is_served(q, k) and self._serves(q, cos, sin)):
            return self._rotate(q, k, cos, sin, *more, **words)
        batch, _, length, head_dim = q.shape
        rope = qflash.Rope(*(self._rows(x, head_dim // 2).flatten(0, 1) for x in (cos, sin)))
        positions = None
        if cos.shape[0] > 1:  # a row of the tables for each token of each sequence
            positions = torch.arange(batch * length, dtype=torch.int32, device=q.device).view(batch, length)
        return tuple(qflash.rope(x.transpose(1, 2), rope, positions=positions).transpose(1, 2) for x in (q, k))

    def _serves(self, q: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether q and k, of one type, are rotated by these tables as qflash.rope does it."""
        if not self._keeps_type and torch.result_type(q, cos) is not q.dtype:  # the results have the tables' type
            return False
        is_constant = not (cos.requires_grad or sin.requires_grad or _has_tangent(cos, sin))
        return is_constant and _is_plain(cos) and _is_plain(sin) and self._have_halves(cos, sin)

    def _have_halves(self, cos: Tensor, sin: Tensor) -> bool:
        """Whether each angle is there twice. On a GPU that is looked at once, because looking waits for the device."""
        if self._had_halves is not None and _has_to_wait(cos):
            return self._had_halves
        try:
            have_halves = has_halves(cos, sin, self._form)
        except RuntimeError:  # values that nobody can look at: those of torch.func.vmap or of a tracer
            return False
        self._had_halves = have_halves
        return have_halves

    def _rows(self, table: Tensor, half: int) -> Tensor:
        """Each angle once. Where a GPU has two of one, which nobody has seen, it is NaN and not one of the two."""
        rows = table[..., :half]
        if self._form == "once" or not _has_to_wait(table):
            return rows
        return torch.where(rows == table[..., half:], rows.float(), torch.nan)


def _has_to_wait(x: Tensor) -> bool:
    """Whether looking at values waits for a device."""
    return x.is_cuda


def _keeps_type(rotate: Forward, form: str) -> bool:
    """Whether a rotation gives 16-bit q and k back as such, by tables of float32."""
    x = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16, device="cpu")
    table = torch.ones(1, 1, 8 if form == "twice" else 4, dtype=torch.float32, device="cpu")
    return all(out.dtype is x.dtype for out in rotate(x, x, table, table))


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody sees, or changes, what goes into a module or comes out, forward or backward."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def _is_served(*tensors: Tensor) -> bool:
    """Whether qflash takes tensors together. Autocast would make one type of several."""
    first = tensors[0]
    if first.dtype not in _TYPES or first.device.type not in _DEVICES or torch.is_autocast_enabled(first.device.type):
        return False
    is_one = all(_is_plain(x) and x.dtype is first.dtype and x.device == first.device for x in tensors)
    return is_one and not _has_tangent(*tensors)


def _is_plain(x: Any) -> bool:
    """Whether x is a tensor of no class that computes in its own way, as tensors that are quantized or shared do."""
    return type(x) in (Tensor, nn.Parameter)


def _has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode differentiation, which kernels know nothing of, goes through a tensor."""
    if torch.compiler.is_compiling():
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
