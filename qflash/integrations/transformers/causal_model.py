"""A decoder-only model as the decode loops call it: what they need of it, its attention, and the logits of a pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from qflash.integrations.transformers.fusion import Fusion
from qflash.integrations.transformers.names import FUNCTIONS, register

Tensor = torch.Tensor


class CausalModel:
    """A model for causal language modelling. fuse: whether what is recognised runs with fewer launches."""

    def __init__(self, model: Any, fuse: bool) -> None:
        if model.config.is_encoder_decoder:
            raise NotImplementedError(f"{type(model).__name__} has an encoder; allowed: decoder-only models")
        self._parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in self._parameters:
            raise NotImplementedError(
                f"{type(model).__name__} takes no position_ids, which padding needs; allowed: models that do"
            )
        self.model = model
        self._fusion = Fusion(model) if fuse else None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The model with qflash's attention and fewer launches, without gradients. It is as it was afterwards."""
        fused = nullcontext() if self._fusion is None else self._fusion.applied()
        with torch.no_grad(), _attention_by_qflash(self.model), fused:
            yield

    def logits(self, ids: Tensor, positions: Tensor, mask: Any, cache: Any, keep: Tensor | None = None) -> Tensor:
        """`[B, n, vocabulary]` of a pass: of the tokens that `keep`, int64 `[n]`, names; None: of the last ones."""
        takes_keep = "logits_to_keep" in self._parameters
        kept = {"logits_to_keep": 1 if keep is None else keep} if takes_keep else {}
        try:
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **kept,
            )
        finally:
            if self._fusion is not None:
                self._fusion.end_pass()
        if keep is None:
            return out.logits[:, -1:]
        return out.logits if takes_keep else out.logits.index_select(1, keep)

    @property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """The names of modules that run with fewer launches, by what is fused."""
        return {} if self._fusion is None else self._fusion.names

    def ends(self, eos: Any) -> tuple[int, ...]:
        """The tokens that end a sequence: `eos`, one or several, or those of the model's generation_config."""
        eos = self.model.generation_config.eos_token_id if eos is None else eos
        if isinstance(eos, Tensor):
            eos = eos.tolist()
        ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        if not all(isinstance(end, int) for end in ends):
            raise TypeError(f"eos_token_id is {eos!r}; allowed: None, an int or several")
        return ends


@contextmanager
def _attention_by_qflash(model: Any) -> Iterator[None]:
    """A model's attn_implementation as "qf", unless it is one of ours."""
    register()
    before = model.config._attn_implementation
    if before in FUNCTIONS:
        yield
        return
    model.set_attn_implementation("qf")
    if model.config._attn_implementation != "qf":
        raise NotImplementedError(
            f"{type(model).__name__} has attention of its own, {before!r}, which transformers does not replace; "
            "allowed: models whose set_attn_implementation takes any registered name"
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)
