"""A decoder-only model as the decode loops call it: its requirements, its attention, and the logits of a pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from qflash.integrations.transformers.fusion import Fusion
from qflash.integrations.transformers.names import FUNCTIONS, register
from qflash.integrations.transformers.prompts import check_token

Tensor = torch.Tensor


class CausalModel:
    """A model for causal language modelling. fuse: whether modules that are recognized run with fewer launches."""

    def __init__(self, model: Any, fuse: bool) -> None:
        needed = ("config", "generation_config", "set_attn_implementation")
        if not isinstance(model, torch.nn.Module) or any(getattr(model, name, None) is None for name in needed):
            raise TypeError(
                f"model is {type(model).__name__}; allowed: a model of transformers for causal language modelling"
            )
        if model.config.is_encoder_decoder:
            raise NotImplementedError(f"{type(model).__name__} has an encoder; allowed: decoder-only models")
        self._parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in self._parameters:
            raise NotImplementedError(
                f"{type(model).__name__} takes no position_ids, which padding needs; "
                "allowed: models that do, without a wrapper around them"
            )
        self.model = model
        self._fusion = Fusion(model) if fuse else None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Run the model with qflash's attention, fewer launches and no gradients, and restore it on exit."""
        if self.model.training and _is_checkpointing(self.model):
            raise NotImplementedError(
                f"{type(self.model).__name__} trains with gradient checkpointing, which fills no cache; "
                "allowed: model.eval()"
            )
        fused = nullcontext() if self._fusion is None else self._fusion.applied()
        # Pages and tables outlive the call, so they must not be tensors of the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad(), _attention_by_qflash(self.model), fused:
            yield

    def logits(self, ids: Tensor, positions: Tensor, mask: Any, cache: Any, keep: Tensor | None = None) -> Tensor:
        """Logits `[B, n, vocabulary]` of the tokens at the indices `keep`, int64 `[n]`. None: of the last tokens."""
        takes_keep = "logits_to_keep" in self._parameters
        kept = {"logits_to_keep": 1 if keep is None else keep} if takes_keep else {}
        with nullcontext() if self._fusion is None else self._fusion.one_pass():
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **kept,
            )
        if keep is None:
            return out.logits[:, -1:]
        return out.logits if takes_keep else out.logits.index_select(1, keep)

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """The names of modules that run with fewer launches, by kind of fusion."""
        return {} if self._fusion is None else self._fusion.names

    @property
    def as_captured(self) -> tuple[Any, ...]:
        """The state that a captured graph depends on and is not notified about: addresses of weights, and modes."""
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        weights = (*self.model.parameters(), *self.model.buffers())
        return self.model.training, autocast, tuple([(_address(x), x.dtype) for x in weights])

    @property
    def device(self) -> torch.device | None:
        """Where ids must be. None: anywhere, because hooks of accelerate move them."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        return None if weight is None or hasattr(self.model, "_hf_hook") else weight.device

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has embeddings for."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        return int(self.model.config.get_text_config(decoder=True).vocab_size if weight is None else weight.shape[0])

    @property
    def learned_positions(self) -> int | None:
        """The number of learned positions. None: the model computes positions, and there is no last one."""
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is None:
            return None
        for name, module in self.model.named_modules():
            is_of_positions = "pos" in name.rpartition(".")[2] or name.endswith("wpe")
            # Some models have a few rows before the first position.
            if is_of_positions and isinstance(module, torch.nn.Embedding) and 0 <= module.num_embeddings - most <= 8:
                return int(most)
        return None

    def ends(self, eos: Any) -> tuple[int, ...]:
        """The tokens that end a sequence: `eos`, one or several, or those of the model's generation_config."""
        is_given = eos is not None
        eos = eos if is_given else self.model.generation_config.eos_token_id
        if isinstance(eos, Tensor):
            eos = eos.tolist()
        try:
            ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        except TypeError:
            ends = (eos,)
        if not all(isinstance(end, int) for end in ends):
            raise TypeError(f"eos_token_id is {eos!r}; allowed: None, an int or several")
        if is_given:
            for end in ends:
                check_token("eos_token_id", end, self.vocabulary)
        return ends

    def padding(self, pad: int | None, ends: tuple[int, ...]) -> int:
        """The token after the end of a sequence: `pad`, or that of the model's generation_config, its first end, or 0.
        Steps embed it, so a placeholder in the config that is no token, such as -1, is skipped."""
        vocabulary = self.vocabulary
        if pad is not None:
            return check_token("pad_token_id", pad, vocabulary)
        found = (self.model.generation_config.pad_token_id, *ends)
        return next((token for token in found if token is not None and 0 <= token < vocabulary), 0)


def _address(x: Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # a tensor made of other tensors
        return id(x)


def _is_checkpointing(model: Any) -> bool:
    """Whether a model uses activation checkpointing, under its newer name or its older one."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    name = next((name for name in names if hasattr(type(model), name)), None)
    return name is not None and bool(getattr(model, name))


_Attention = list[tuple[Any, str | None]]  # configs, and the attn_implementation of each

_lock = Lock()
_borrowed: WeakKeyDictionary[Any, tuple[int, _Attention]] = WeakKeyDictionary()
"""Models whose attn_implementation is replaced: the number of users of each, and what it was before."""


@contextmanager
def _attention_by_qflash(model: Any) -> Iterator[None]:
    """Set the attn_implementation of a model's text decoder to "qf", unless it is already one of ours. If several
    threads use a model, the last one to finish restores it."""
    register()
    with _lock:
        users, before = _borrowed.get(model, (0, []))
        is_borrowed = users > 0 or _wanted(model.config) != _found(model.config)
        if is_borrowed:
            if not users:
                before = _attention_of(model)
                _set_attention(model, before)
            _borrowed[model] = users + 1, before
    try:
        yield
    finally:
        if is_borrowed:
            with _lock:
                users, before = _borrowed.pop(model)
                if users > 1:
                    _borrowed[model] = users - 1, before
                else:
                    _restore(before)


def _set_attention(model: Any, before: _Attention) -> None:
    """Set ours for the text decoder, or restore `before` if that fails."""
    try:
        model.set_attn_implementation(_wanted(model.config))
        found = _text_decoder(model.config)._attn_implementation
        if found not in FUNCTIONS:
            raise NotImplementedError(
                f"{type(model).__name__} has attention of its own, {found!r}, which transformers does not replace; "
                "allowed: models whose set_attn_implementation takes any registered name"
            )
    except BaseException:
        _restore(before)
        raise


def _restore(before: _Attention) -> None:
    for config, name in before:
        config._attn_implementation_internal = name  # the property would set it for all nested configs, too


def _attention_of(model: Any) -> _Attention:
    """The attn_implementation of all configs of a model, including those of submodules that its own config lacks."""
    configs = [model.config, *(part.config for part in model.modules() if isinstance(part, PreTrainedModel))]
    known: dict[int, Any] = {}  # by id: configs have no hash
    while configs:
        config = configs.pop()
        if id(config) not in known:
            known[id(config)] = config
            configs += _inside(config).values()
    return [(config, config._attn_implementation) for config in known.values()]


def _inside(config: Any) -> dict[str, Any]:
    """The configs of a config's parts, such as its text decoder or its vision encoder, by name."""
    found = {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: part for name, part in found.items() if isinstance(part, PreTrainedConfig)}


def _text_decoder(config: Any) -> Any:
    """The config of the part that generates, or config itself if it has no such part."""
    text = config.get_text_config(decoder=True)
    return text if _leads_to(config, text) else config


def _leads_to(config: Any, part: Any) -> bool:
    return config is part or any(_leads_to(inner, part) for inner in _inside(config).values())


def _found(config: Any) -> Any:
    """The attn_implementation of a config and of its nested configs, in the form that set_attn_implementation takes."""
    return _tree(config, lambda part: False)


def _wanted(config: Any) -> Any:
    """The same with ours for the text decoder, for the configs around it, which some models use to make masks, and, if
    the decoder had none of ours, for all configs nested in it: some have no name in transformers."""
    text = _text_decoder(config)
    is_new = text._attn_implementation not in FUNCTIONS
    return _tree(config, lambda part: _leads_to(part, text) or (is_new and _leads_to(text, part)))


def _tree(config: Any, is_wanted: Callable[[Any], bool]) -> Any:
    own = config._attn_implementation
    own = "qf" if own not in FUNCTIONS and is_wanted(config) else own
    parts = {name: _tree(part, is_wanted) for name, part in _inside(config).items()}
    return {"": own} | parts if parts else own
