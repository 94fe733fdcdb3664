"""What `generate` is given: prompts, padding masks and how many tokens are wanted. What is wrong is said here: a model
would fail far away from it, or not at all."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

_INTEGERS = (torch.int64, torch.int32)


def check_count(name: str, value: Any) -> None:
    """Refuse what is no number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; allowed: an int, 1 and more")
    if value < 1:
        raise ValueError(f"{name} is {value}; allowed: 1 and more")


def check_prompts(ids: Any, mask: Any) -> None:
    """Refuse what are no ids `[B, T]`, or no padding mask for them. Values are looked at in `left_padded`."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"input_ids is {type(ids).__name__}; allowed: a tensor [batch, length], return_tensors='pt'")
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"input_ids has shape {list(ids.shape)}; allowed: [batch, length], with a token at least")
    if ids.dtype not in _INTEGERS:
        raise TypeError(f"input_ids has dtype {ids.dtype}; allowed: int64, int32")
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask is {type(mask).__name__}; allowed: None, or a tensor [batch, length]")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; allowed: that of input_ids, {list(ids.shape)}")


def left_padded(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The prompts with their padding on the left, wherever it was, and their mask: int64, 1 where there is a token.

    Anything but 0 in the mask is a token, as it is to transformers.
    """
    if mask is None:
        return ids, torch.ones_like(ids, dtype=torch.int64)
    mask = (mask != 0).to(torch.int64)
    empty = (mask.sum(1) == 0).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"attention_mask has no token in rows {empty}; allowed: one or more in each row")
    order = mask.argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)
