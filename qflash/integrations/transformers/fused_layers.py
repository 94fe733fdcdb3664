"""fuse_layers: fuses what a model computes between its matrix products in many small steps, forward and backward.

A recognized module gets a new class, derived from the class it had, with another forward. An attribute `forward` would
be bound to one module: its copies, pickled or not, and the replicas of torch.nn.DataParallel would compute with that
module's weights.
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
    """Run rotary embeddings by `qflash.rope`, Llama MLPs by `qflash.swiglu`, and RMS norms by PyTorch's own kernel.

    This is meant for training, where these steps take longer than attention, and it changes the model permanently.
    Parameters, their names and gradients are unchanged, and results agree within rounding. Modules are recognized by
    trying them on small arrays. Everything else runs unchanged: layers with hooks, layers that are replaced later,
    tensors that qflash does not support (float64, subclasses), forward-mode differentiation, and calls under autocast,
    except for RMS norms of float32. `qflash.swiglu` has no second derivative. On a GPU the tables of a rotation are
    checked once: if later tables have two different angles for a pair of channels, the results are NaN.

    A module keeps the name of its type and is an instance of that type; it can be copied, pickled and replicated. A
    `Decoder` itself fuses what is worthwhile there: give it the unchanged model.

    Returns:
        The names of the fused modules, by kind of fusion: "rope", "swiglu", "rms_norm".

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
    """What a module is, and the details that its forward needs."""
    if type(module) is not class_as_made(module):  # already fused
        return None
    if (rotation := rotation_of(module)) is not None:
        return "rope", _Rotating(type(module), rotation[1])
    if (known := _tried(module)) is None:
        return None
    other = copy.copy(module)
    other.training = not module.training
    return known if _tried(other) == known else None


def _tried(module: nn.Module) -> tuple[str, Any] | None:
    """What a module is in its current mode, training or not."""
    if not any(map(_is_hooked, module.children())) and is_swiglu(module):
        return "swiglu", type(module.act_fn)
    if (formula := norm_weight(module)) is not None:
        return "rms_norm", formula == "1 + w"
    return None


@cache
def _fused(made: Any, kind: str) -> Any:
    """A class derived from `made`, with its name, that runs in fewer steps."""
    run, original = _FORWARDS[kind], made.forward

    @wraps(original)
    def forward(module: Any, *arguments: Any, **words: Any) -> Any:
        # The class may have been given another forward since.
        return (run if made.forward is original else made.forward)(module, *arguments, **words)

    def reduced(module: Any, protocol: Any) -> Any:
        """For pickle and copy, which look a class up by its name and would find the original one."""
        function, arguments, *state = super(fused, module).__reduce_ex__(max(int(protocol), 2))
        return (_new, (made, kind), *state) if arguments == (fused,) else (function, arguments, *state)

    names = {name: getattr(made, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"forward": forward, "__reduce_ex__": reduced, "_qflash_as_made": made}
    fused = type(made)(made.__name__, (made,), names)
    return fused


def _new(made: Any, kind: str) -> Any:
    """A fused module without its state, which is set later."""
    fused = _fused(made, kind)
    return fused.__new__(fused)


def _attention(module: Any, *arguments: Any, **words: Any) -> Any:
    # In a compiled model the replaced globals of a copied function are not visible.
    is_as_made = torch.compiler.is_compiling() or not module._qflash_detail.is_valid()
    forward = class_as_made(module).forward if is_as_made else module._qflash_detail.forward
    return forward(module, *arguments, **words)


def _swiglu(mlp: Any, *arguments: Any, **words: Any) -> Any:
    gate, up, act = mlp.gate_proj, mlp.up_proj, mlp.act_fn
    is_known = len(arguments) == 1 and not words and is_plain_linear(gate) and is_plain_linear(up)
    if not is_known or type(act) is not mlp._qflash_detail or any(map(_is_hooked, (gate, up, act))):
        return class_as_made(mlp).forward(mlp, *arguments, **words)
    weights = gate.weight, up.weight, gate.bias, up.bias
    # PyTorch broadcasts an output of one column.
    if gate.weight.shape != up.weight.shape or not _is_served(*arguments, *(x for x in weights if x is not None)):
        return class_as_made(mlp).forward(mlp, *arguments)
    return mlp.down_proj(qflash.swiglu(*arguments, gate.weight.T, up.weight.T, gate.bias, up.bias))


def _norm(module: Any, *arguments: Any, **words: Any) -> Any:
    return fused_norm(module, module._qflash_detail, *arguments, **words)


_FORWARDS: dict[str, Forward] = {"rope": _attention, "swiglu": _swiglu, "rms_norm": _norm}


class _Rotating:
    """The forward of an attention class with `_Rotation` in it. Each module, and each copy of one, has its own."""

    def __init__(self, made: Any, form: str) -> None:
        self._made, self._form = made, form
        self._rotate = made.forward.__globals__[NAME]
        self.forward = with_global(made.forward, NAME, _Rotation(self._rotate, form))

    def is_valid(self) -> bool:
        """Whether the class still rotates with the same function: its module may have been given another one."""
        return self._made.forward.__globals__.get(NAME) is self._rotate

    def __reduce__(self) -> Any:
        return _Rotating, (self._made, self._form)


class _Rotation:
    """Replaces the function with which an attention module rotates q and k."""

    def __init__(self, rotate: Forward, form: str) -> None:
        self._rotate, self._form = rotate, form
        self._keeps_type = _keeps_type(rotate, form)
        self._had_halves: bool | None = None  # not checked yet

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
        """Whether qflash.rope rotates q and k, which have one dtype, by these tables as the module does."""
        if not self._keeps_type and torch.result_type(q, cos) is not q.dtype:  # the results have the tables' dtype
            return False
        is_constant = not (cos.requires_grad or sin.requires_grad or _has_tangent(cos, sin))
        return is_constant and _is_plain(cos) and _is_plain(sin) and self._have_halves(cos, sin)

    def _have_halves(self, cos: Tensor, sin: Tensor) -> bool:
        """Whether each angle occurs twice. On a GPU this is checked once, because the check waits for the device."""
        if self._had_halves is not None and _has_to_wait(cos):
            return self._had_halves
        try:
            have_halves = has_halves(cos, sin, self._form)
        except RuntimeError:  # values that cannot be read: those of torch.func.vmap or of a tracer
            return False
        self._had_halves = have_halves
        return have_halves

    def _rows(self, table: Tensor, half: int) -> Tensor:
        """Each angle once. On a GPU, where later tables are not checked, two different angles of a pair become NaN."""
        rows = table[..., :half]
        if self._form == "once" or not _has_to_wait(table):
            return rows
        return torch.where(rows == table[..., half:], rows.float(), torch.nan)


def _has_to_wait(x: Tensor) -> bool:
    """Whether reading values waits for a device."""
    return x.is_cuda


def _keeps_type(rotate: Forward, form: str) -> bool:
    """Whether a rotation of 16-bit q and k by float32 tables keeps their dtype."""
    x = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16, device="cpu")
    table = torch.ones(1, 1, 8 if form == "twice" else 4, dtype=torch.float32, device="cpu")
    return all(out.dtype is x.dtype for out in rotate(x, x, table, table))


def _is_hooked(module: nn.Module) -> bool:
    """Whether hooks read or change a module's inputs or outputs, forward or backward."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def _is_served(*tensors: Tensor) -> bool:
    """Whether qflash supports these tensors together. Autocast would convert them to one dtype."""
    first = tensors[0]
    if first.dtype not in _TYPES or first.device.type not in _DEVICES or torch.is_autocast_enabled(first.device.type):
        return False
    is_one = all(_is_plain(x) and x.dtype is first.dtype and x.device == first.device for x in tensors)
    return is_one and not _has_tangent(*tensors)


def _is_plain(x: Any) -> bool:
    """Whether x belongs to no subclass with its own arithmetic, such as quantized or distributed tensors."""
    return type(x) in (Tensor, nn.Parameter)


def _has_tangent(*tensors: Tensor) -> bool:
    """Whether a tensor takes part in forward-mode differentiation, which kernels do not support."""
    if torch.compiler.is_compiling():
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
