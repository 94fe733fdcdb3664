"""Linear layers of a model in INT8: a scale per output channel for weights, and one per token for activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import qflash
from qflash.integrations.transformers.joined import LINEARS, groups_of, is_plain_linear, join
from qflash.integrations.transformers.stand_ins import is_swiglu

Tensor = torch.Tensor


@dataclass(frozen=True)
class Int8Layers:
    """The result of `quantize_linears`.

    Attributes:
        names: the layers that are INT8 now; layers merged into one matrix product have one name, joined by +.
        skipped: the layers that are unchanged.
        bytes_before: the size of the weights and biases of `names` before.
        bytes_after: their size now.
    """

    names: tuple[str, ...]
    skipped: tuple[str, ...]
    bytes_before: int
    bytes_after: int


class _Int8Weights(nn.Module):
    """An INT8 weight, a bias, and the shape and dtype of the original weight."""

    values: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: `[K, N]`, as in `qflash.linear`."""
        super().__init__()
        if not isinstance(weight, Tensor):
            raise TypeError(f"weight is {type(weight).__name__}; allowed: a tensor [K, N]")
        layer = qflash.quantize_linear(weight.detach())
        self.register_buffer("values", layer.values)
        self.register_buffer("scale", layer.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.weight_dtype = layer.dtype
        self.out_features, self.in_features = layer.values.shape

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move to another device or dtype, except that the scales are always float32."""
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.scale.device)
        return self

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, `[N, K]` as in `torch.nn.Linear`: models read its dtype, and some multiply by it
        themselves (Mamba)."""
        return (self.values * self.scale[:, None]).to(getattr(torch, self.weight_dtype))

    def _check_no_gradient(self, x: Tensor) -> None:
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(
                f"x requires a gradient and {type(self).__name__} is forward only; allowed: a call under "
                "torch.no_grad(), or a model none of whose parameters requires a gradient"
            )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(_Int8Weights):
    """x w + bias with an INT8 weight; x is quantized in the call, with a scale per token. Forward only."""

    def forward(self, x: Tensor) -> Tensor:
        self._check_no_gradient(x)
        return qflash.linear(x, qflash.QuantizedLinear(self.values, self.scale, self.weight_dtype), self.bias)


class Int8Swiglu(_Int8Weights):
    """A Llama MLP: down_proj(silu(x gate) · (x up)). Gate and up are halves of one weight, and x is quantized once."""

    def __init__(self, mlp: Any) -> None:
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        super().__init__(torch.cat([gate.weight, up.weight]).T, _joined_bias((gate, up)))
        self.down_proj = Int8Linear(down.weight.T, down.bias)

    def forward(self, x: Tensor) -> Tensor:
        self._check_no_gradient(x)
        halves = zip(self.values.chunk(2), self.scale.chunk(2), strict=True)
        gate, up = (qflash.QuantizedLinear(values, scale, self.weight_dtype) for values, scale in halves)
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        return self.down_proj(qflash.swiglu(x, gate, up, *biases))


def quantize_linears(
    model: nn.Module, precision: Literal["int8"] = "int8", *, skip: Sequence[str] | None = None
) -> Int8Layers:
    """Convert the linear layers of a model to INT8 in place: `torch.nn.Linear`, and transformers' `Conv1D` (GPT-2).

    Weights have a scale per output channel, activations a scale per token, and accumulators are int32. q, k and v of an
    attention become one matrix product, as do gate and up of an MLP, whose silu and multiplication are fused into the
    same kernel.

    Args:
        model: a model of transformers, or any torch.nn.Module, on the CPU or a CUDA GPU.
        precision: "int8".
        skip: names of layers that stay unchanged, in full or from a dot on: "lm_head", "mlp.down_proj",
            "model.layers.0.self_attn.q_proj". None: the layer that computes logits, because its errors affect all of
            them. (): none.

    Returns:
        `Int8Layers`: which layers are INT8 now, and their size in bytes before and after.

    16-bit weights are freed one by one, so at most one layer is in memory twice at any time. A weight shared with an
    embedding (tied) is kept for the embedding; the layer, unless skipped, gets an INT8 copy, and the model is no longer
    tied. INT8 layers are forward only: an input that requires a gradient raises an error. `save_pretrained` then raises
    an error too, because `from_pretrained` does not support INT8 layers: save the model before, or save its state_dict
    for a model converted by the same `quantize_linears` call.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from qflash.integrations.transformers import quantize_linears
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4)
        >>> layers = quantize_linears(LlamaForCausalLM(config))
        >>> layers.names[:2], layers.skipped
        (('model.layers.0.mlp', 'model.layers.0.self_attn.q_proj+k_proj+v_proj'), ('lm_head',))
        >>> layers.bytes_after / layers.bytes_before < 0.3
        True
    """
    if precision != "int8":
        raise ValueError(f"precision is {precision!r}; allowed: 'int8'")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; allowed: a torch.nn.Module")
    skipped = _skipped(model, skip)
    change = _Change(model, lambda name: name in skipped)
    change.swiglus()
    change.groups()
    change.layers()
    if not change.names:
        allowed = "allowed: a model with torch.nn.Linear or Conv1D layers"
        raise ValueError(f"model is {type(model).__name__} without a layer to quantize; {allowed}, not all in skip")
    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            module.save_pretrained = _refuse_to_save
    return Int8Layers(tuple(change.names), tuple(sorted(skipped)), change.before, change.after)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """`save_pretrained` of a model with INT8 layers. It has no reference to the model, so that copies can share it."""
    raise NotImplementedError(
        "save_pretrained of a model with INT8 layers, whose names from_pretrained does not know; allowed: "
        "save_pretrained before quantize_linears, or torch.save(model.state_dict(), path) and load_state_dict after "
        "quantize_linears"
    )


class _Change:
    """Converts the layers of a model to INT8, larger groups first."""

    def __init__(self, model: nn.Module, skip: Callable[[str], bool]) -> None:
        self._model, self._skip = model, skip
        self.names: list[str] = []
        self.before = self.after = 0

    def swiglus(self) -> None:
        """Convert MLPs as units."""
        for name, module in list(self._model.named_modules()):
            inner = [f"{name}.{child}" for child in ("gate_proj", "up_proj", "down_proj")]
            if not any(map(self._skip, inner)) and is_swiglu(module) and _is_one_shape(module):
                self._replace(name, module, Int8Swiglu)

    def groups(self) -> None:
        """Merge projections of one input into one matrix product."""
        for name, module, children in groups_of(self._model, self._skip):
            layers = [module.get_submodule(child) for child in children]
            whole = f"{name}.{'+'.join(children)}".removeprefix(".")
            with _noted(whole):
                product = Int8Linear(torch.cat([layer.weight.detach() for layer in layers]).T, _joined_bias(layers))
            join(module, children, product)
            self._count(whole, layers, product)

    def layers(self) -> None:
        """Convert all other layers."""
        for name, module in list(self._model.named_modules(remove_duplicate=False)):
            if self._skip(name) or not name:
                continue
            if is_plain_linear(module):
                self._replace(name, module, lambda layer: Int8Linear(layer.weight.T, layer.bias))
            elif type(module) is Conv1D:
                self._replace(name, module, lambda layer: Int8Linear(layer.weight, layer.bias))

    def _replace(self, name: str, module: nn.Module, make: Callable[[Any], nn.Module]) -> None:
        with _noted(name):
            new = make(module)
        self._model.set_submodule(name, new)
        self._count(name, [module], new)

    def _count(self, name: str, old: Sequence[nn.Module], new: nn.Module) -> None:
        self.names.append(name)
        self.before += sum(map(_bytes, old))
        self.after += _bytes(new)


def _skipped(model: nn.Module, skip: Sequence[str] | None) -> set[str]:
    """The full names of layers that are skipped."""
    names = {name for name, module in model.named_modules() if type(module) in (*LINEARS, Conv1D)}
    if skip is None:
        last = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        return {name for name, module in model.named_modules() if module is last and name in names}
    if not isinstance(skip, list | tuple | set | frozenset) or not all(isinstance(one, str) for one in skip):
        raise TypeError(f"skip is {skip!r}; allowed: None, or a list of names")
    found = set()
    for one in skip:
        matching = {name for name in names if name == one or name.endswith(f".{one}")}
        if not matching:
            raise ValueError(f"skip has {one!r}, which no linear layer is called; allowed: names of the model's layers")
        found |= matching
    return found


def _is_one_shape(mlp: Any) -> bool:
    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if not all(map(is_plain_linear, layers)):
        return False
    kinds = {(layer.weight.dtype, layer.weight.device) for layer in layers}
    first, second = layers[:2]
    same = first.weight.shape == second.weight.shape and (first.bias is None) == (second.bias is None)
    return same and len(kinds) == 1


def _joined_bias(layers: Sequence[Any]) -> Tensor | None:
    return None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])


def _bytes(module: nn.Module) -> int:
    return sum(x.numel() * x.element_size() for x in (*module.parameters(), *module.buffers()))


class _noted:
    """Adds the name of the layer to errors raised inside."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            error.add_note(f"in layer {self._name}")
