"""Layers that read the same input as one matrix product: q, k and v of attention, gate and up of an MLP.

A model calls them in sequence. The first call computes the product for all of them, and the others return their columns
of it if the result would be the same: the input is the same tensor object, and nothing else has changed in between.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor

# Names of children of one module that models call with one input.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joined(nn.Module):
    """One matrix product, and how many of its columns belong to each layer. product: a module that maps `[..., K]` to
    `[..., N]`, with parameters and buffers only of its own.

    It is a submodule of every part, so the model keeps its weights as long as one part is left.
    """

    def __init__(self, product: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.product = product
        self.ends = tuple(itertools.accumulate(sizes, initial=0))
        # By thread, because threads may share a model: input and state of the product, and the columns not yet taken.
        # Weights are not kept alive here: INT8 layers replace a product to free its memory.
        self._left: dict[int, tuple[Tensor | None, list[weakref.ref[Tensor]], Any, dict[int, Tensor]]] = {}
        self._saved_as = ""  # the prefix of its names in the last state_dict
        self._loads: Any = None  # identifies one load_state_dict call

    def take(self, index: int, x: Tensor) -> Tensor:
        """Return the columns of layer `index`."""
        product, is_traced = self.product, torch.compiler.is_compiling()
        thread = 0 if is_traced else threading.get_ident()
        weights = [] if is_traced else _tensors(product)  # in a graph they do not change between two parts
        state = _state([x, *weights])
        source, references, before, left = self._left.pop(thread, (None, [], None, {}))
        is_same = source is x and state == before
        is_same = is_same and all([one() is weight for one, weight in zip(references, weights, strict=True)])
        if not is_same or index not in left:
            out = product(x)
            references = [weakref.ref(weight) for weight in weights]
            left = {i: self._columns(out, i) for i in range(len(self.ends) - 1)}
        taken = left.pop(index)
        if left:
            self._left[thread] = (x, references, state, left)
        return taken

    def _columns(self, out: Tensor, index: int) -> Tensor:
        return out[..., self.ends[index] : self.ends[index + 1]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._left.clear()  # weights that move keep their identity, and their version
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle. Columns belong to a computation in progress; those with gradients cannot be copied."""
        return {**vars(self), "_left": {}, "_loads": None}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """List the product once, even if duplicates are requested: the caller would replace modules by name, and so
        replace the product once for each part."""
        return super().named_modules(memo, prefix, True)

    def state_dict(self, *arguments: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Save the product once in a state of several parts, under the name that the first part gives it."""
        if destination is not None and prefix != self._saved_as and self._is_saved_in(destination):
            return destination
        self._saved_as = prefix
        return super().state_dict(*arguments, destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _is_saved_in(self, destination: Any) -> bool:
        saved = [
            (x, destination.get(f"{self._saved_as}product.{name}")) for name, x in self.product.state_dict().items()
        ]
        return all(isinstance(found, Tensor) and found.data_ptr() == x.data_ptr() for x, found in saved)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *lists: Any
    ) -> None:
        if self._loads is missing_keys:  # PyTorch has one list for a whole model: another part has loaded the product
            for name, x in self.product.state_dict().items():
                state_dict.setdefault(f"{prefix}product.{name}", x)
        self._loads = missing_keys
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *lists)


class JoinedLinear(nn.Linear):
    """A merged layer whose weights appear in a state_dict as those of its parts, under their original names."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        unexpected += [key for key in state_dict if key.startswith(prefix)] if strict else []


class JoinedPart(nn.Module):
    """Replaces a layer and returns its columns of a product. All parts of a product have it as a submodule; PyTorch
    lists its parameters once."""

    def __init__(self, joined: Joined, index: int) -> None:
        super().__init__()
        self.joined = joined
        self.index = index
        self.out_features = joined.ends[index + 1] - joined.ends[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.joined.take(self.index, x)

    def requires_grad_(self, requires_grad: bool = True) -> JoinedPart:
        """Apply to all parts or none: their weights are one parameter, which either has a gradient or has none."""
        if any(x.requires_grad != requires_grad for x in self.parameters()):
            part = f"part {self.index} of {len(self.joined.ends) - 1} of a joined layer"
            raise NotImplementedError(
                f"requires_grad_({requires_grad}) of {part}, whose weights are one parameter; allowed: requires_grad_ "
                "of the module that has all the parts, or of `joined` of one of them, or of single layers before "
                "fuse_projections, which joins none that differ"
            )
        return self

    def _own(self) -> dict[str, Tensor]:
        """This layer's original parameters: rows of the weight and bias of a `JoinedLinear`, as views."""
        joined = self.joined
        if not isinstance(joined.product, JoinedLinear):
            return {}
        rows = slice(*joined.ends[self.index : self.index + 2])
        return {name: whole[rows] for name, whole in joined.product.named_parameters()}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, rows in self._own().items():
            destination[prefix + name] = rows if keep_vars else rows.detach()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = self._own()
        rest = {key: x for key, x in state_dict.items() if key.removeprefix(prefix) not in own}
        lists = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, *lists)
        for name, rows in own.items():
            key = prefix + name
            if key not in state_dict:
                missing_keys += [key] if strict else []
            elif not isinstance(state_dict[key], Tensor):
                error_msgs.append(f"{key} is {type(state_dict[key]).__name__}; allowed: a tensor")
            elif state_dict[key].shape != rows.shape:
                came, allowed = list(state_dict[key].shape), list(rows.shape)
                error_msgs.append(f"{key} has shape {came}; allowed: {allowed}")
            elif local_metadata.get("assign_to_params_buffers", False) or rows.is_meta:
                how = "on the meta device" if rows.is_meta else "to be assigned"
                error_msgs.append(f"{key} is {how}, but is a part of a joined weight; allowed: a copy into memory")
            else:
                with torch.no_grad():
                    rows.copy_(state_dict[key])

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}, part {self.index} of {len(self.joined.ends) - 1}"


LINEARS = (nn.Linear, JoinedLinear)


def groups_of(model: nn.Module, skip: Any = lambda name: False) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Yield every module of a decoder with children that may be merged: its name, the module, and the children's names.

    A model with an encoder yields none: its cross attention reads keys and queries from different inputs. `skip`
    returns whether the layer of a given full name stays unchanged.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    used = _uses(model)
    for name, module in list(model.named_modules()):
        for children in GROUPS:
            layers = [module._modules.get(child) for child in children]
            if any(skip(f"{name}.{child}") for child in children):
                continue
            if all(is_plain_linear(layer) and used[id(layer.weight)] == 1 for layer in layers) and _fit(layers):
                yield name, module, children


def is_plain_linear(layer: Any) -> bool:
    """Whether a layer is a torch.nn.Linear, or several merged, without hooks."""
    return type(layer) in LINEARS and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def join(module: nn.Module, children: Sequence[str], product: nn.Module) -> None:
    """Replace children of `module` with parts of a product, which computes their columns in this order."""
    joined = Joined(product, [module.get_submodule(child).out_features for child in children])
    for index, child in enumerate(children):
        setattr(module, child, JoinedPart(joined, index))


def fuse_projections(model: nn.Module) -> tuple[str, ...]:
    """Compute q, k and v of each attention, and gate and up of each MLP, as one matrix product.

    This means fewer launches, which are most of the cost of a step of few tokens on a GPU. The model is changed
    permanently. Its state_dict keeps names and shapes, as views of the merged weights, so checkpoints are
    interchangeable with those of an unchanged model. Weights take no additional memory. They have gradients as before,
    but for all layers of a product or for none. A layer of a product may be replaced later. Other types of layers, and
    layers with hooks, of different dtypes or whose weights are used elsewhere, stay unchanged. Results agree with the
    previous ones within rounding.

    Returns:
            The names of the layers, with one name per product: "model.layers.0.self_attn.q_proj+k_proj+v_proj".

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from qflash.integrations.transformers import fuse_projections
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4)
        >>> fuse_projections(LlamaForCausalLM(config))
        ('model.layers.0.self_attn.q_proj+k_proj+v_proj', 'model.layers.0.mlp.gate_proj+up_proj')
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; allowed: a torch.nn.Module")
    names = []
    for name, module, children in groups_of(model):
        layers = [module.get_submodule(child) for child in children]
        join(module, children, _one_linear(layers))
        names.append(f"{name}.{'+'.join(children)}".removeprefix("."))
    return tuple(names)


def _one_linear(layers: Sequence[Any]) -> JoinedLinear:
    first = layers[0]
    outputs = sum(layer.out_features for layer in layers)
    product = JoinedLinear(first.in_features, outputs, bias=first.bias is not None, device="meta")
    for name in ("weight", "bias") if first.bias is not None else ("weight",):
        parts = [getattr(layer, name) for layer in layers]
        whole = torch.cat([part.detach() for part in parts])
        setattr(product, name, nn.Parameter(whole, requires_grad=all(part.requires_grad for part in parts)))
    return product


def _fit(layers: Sequence[Any]) -> bool:
    """Whether layers take the same input and return the same dtype."""
    kinds = {
        (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None, layer.weight.requires_grad)
        for layer in layers
    }
    return len(kinds) == 1


def _uses(model: nn.Module) -> dict[int, int]:
    """The number of modules that have a parameter, by its id."""
    used: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                used[id(parameter)] = used.get(id(parameter), 0) + 1
    return used


def _tensors(product: nn.Module) -> list[Tensor]:
    """The weights of a product itself, without those of its submodules."""
    return [x for x in (*product._parameters.values(), *product._buffers.values()) if x is not None]


def _state(sources: Sequence[Tensor]) -> tuple[Any, ...]:
    """What else a product of the same tensors depends on: whether they were written to, modes of PyTorch, which
    determine its dtype and whether it has a gradient, and the stream. `sources`: the input, and the weights."""
    device = sources[0].device.type
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    cast = torch.get_autocast_dtype(device) if is_cast else None
    is_inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    tensors = [(_version(x), x.requires_grad) for x in sources]
    return tensors, torch.is_grad_enabled(), is_inference, cast, _stream(sources[0])


def _stream(x: Tensor) -> int | None:
    """The CUDA stream of a call: another stream must not read columns that this one may not have written yet."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return None
    return torch.cuda.current_stream(x.device).cuda_stream


def _version(x: Tensor) -> int:
    """A value that changes when a tensor is written to; tensors of inference mode, and of a graph, have none."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version
