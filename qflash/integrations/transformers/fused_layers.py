"""fuse_layers: what a model computes between its products in many small steps, in one each, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

import qflash
from qflash.integrations.transformers.fusion import fused_norm
from qflash.integrations.transformers.joined import is_plain_linear
from qflash.integrations.transformers.rotations import NAME, fits, has_halves, rotation_of, with_global
from qflash.integrations.transformers.stand_ins import is_swiglu, norm_weight

Tensor = torch.Tensor
Forward = Callable[..., Any]


def fuse_layers(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Compute rotary embeddings by `qflash.rope`, MLPs of Llama by `qflash.swiglu` and RMS norms by PyTorch's own
    kernel, for good. It is meant for training, where these steps take longer than attention does.

    Parameters, their names and gradients are as before, and results are within rounding. What is recognised is found
    out by trying it on small arrays; everything else, layers with hooks, layers that somebody replaces later and calls
    under autocast run as they were made. A `Decoder` fuses by itself, and more: give it a model that was not changed.

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
        if (known := _forward_of(module)) is not None:
            kind, forward = known
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
            found[kind].append(name)
    return {kind: tuple(names) for kind, names in found.items() if names}


def _forward_of(module: nn.Module) -> tuple[str, Forward] | None:
    """What a module is, and its forward in fewer steps."""
    if (rotation := rotation_of(module)) is not None:
        return "rope", _rotating(type(module).forward, _Rotation(*rotation))
    if is_swiglu(module):
        return "swiglu", _swiglu
    if (formula := norm_weight(module)) is not None:
        return "rms_norm", _norm if formula == "w" else _norm_plus_one
    return None


def _rotating(original: Any, rotation: _Rotation) -> Forward:
    """An attention module's forward that rotates so. A compiled model finds nothing in the globals of a copied one."""
    inner = with_global(original, NAME, rotation)

    def forward(module: Any, *arguments: Any, **words: Any) -> Any:
        return (original if torch.compiler.is_compiling() else inner)(module, *arguments, **words)

    return forward


def _swiglu(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj, mlp.up_proj
    if not (is_plain_linear(gate) and is_plain_linear(up)) or not _has_one_type(x, gate.weight, up.weight):
        return type(mlp).forward(mlp, x)
    return mlp.down_proj(qflash.swiglu(x, gate.weight.T, up.weight.T, gate.bias, up.bias))


def _norm(module: Any, *arguments: Any, **words: Any) -> Any:
    return fused_norm(module, False, *arguments, **words)


def _norm_plus_one(module: Any, *arguments: Any, **words: Any) -> Any:
    return fused_norm(module, True, *arguments, **words)


class _Rotation:
    """Stands in the place of the function that an attention module rotates q and k by."""

    def __init__(self, rotate: Forward, form: str) -> None:
        self._rotate, self._form = rotate, form
        self._has_halves: bool | None = None  # not looked at yet: once, because looking waits for the device

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **words: Any) -> Any:
        is_known = not (more or words) and fits(q, k, cos, sin, self._form)
        if is_known and self._has_halves is None:
            self._has_halves = has_halves(cos, sin, self._form)
        if not (is_known and self._has_halves and _has_one_type(q, k)):
            return self._rotate(q, k, cos, sin, *more, **words)
        batch, _, length, head_dim = q.shape
        rope = qflash.Rope(*(x[..., : head_dim // 2].flatten(0, 1) for x in (cos, sin)))
        positions = None
        if cos.shape[0] > 1:  # a row of the tables for each token of each sequence
            positions = torch.arange(batch * length, dtype=torch.int32, device=q.device).view(batch, length)
        return tuple(qflash.rope(x.transpose(1, 2), rope, positions=positions).transpose(1, 2) for x in (q, k))


def _has_one_type(*tensors: Tensor) -> bool:
    """Of tensors that qflash takes together: autocast would make one type of several."""
    device = tensors[0].device.type
    return len({x.dtype for x in tensors}) == 1 and not torch.is_autocast_enabled(device)
