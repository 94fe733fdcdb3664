"""Checks of the arguments of `generate`: prompts, padding masks, special tokens, counts. Errors are raised here,
because the model would fail in an unrelated place, or not at all."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

_INTEGERS = (torch.int64, torch.int32)


def check_int(name: str, value: Any, allowed: str = "an int") -> None:
    """Reject a value that is not an int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; allowed: {allowed}")


def check_count(name: str, value: Any) -> None:
    """Reject a value that is not a number of tokens."""
    check_int(name, value, "an int, 1 and more")
    if value < 1:
        raise ValueError(f"{name} is {value}; allowed: 1 and more")


def check_flag(name: str, value: Any) -> None:
    """Reject a value that is neither True nor False; 0 and 1 are accepted."""
    if not (isinstance(value, int) and value in (0, 1)):
        raise TypeError(f"{name} is {value!r}; allowed: True or False")


def check_cache_precision(value: Any) -> None:
    """Reject a precision that pages do not support."""
    if value not in (None, "int8"):
        raise ValueError(f"cache_precision is {value!r}; allowed: None, 'int8'")


def check_seed(seed: Any) -> None:
    """Reject a seed that PyTorch's generators do not accept."""
    if seed is None:
        return
    check_int("seed", seed, "None, or an int")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; allowed: None, or -2^63 to 2^64 - 1")


def check_stream(stream: Any) -> None:
    """Reject a stream that is not callable."""
    if stream is not None and not callable(stream):
        raise TypeError(f"stream is {stream!r}; allowed: None, or a function of a list of tokens")


def check_token(name: str, token: Any, vocabulary: int) -> int:
    """Reject a token outside the vocabulary, which would be looked up past the end of the embedding."""
    check_int(name, token, f"an int, 0 to {vocabulary - 1}")
    if not 0 <= token < vocabulary:
        raise ValueError(f"{name} is {token}; allowed: 0 to {vocabulary - 1}, as the model's vocabulary has")
    return token


def check_in_vocabulary(ids: Tensor, vocabulary: int) -> None:
    """Reject ids without an embedding. On a GPU they would end the process's CUDA context, not only the call."""
    is_wrong = (ids < 0) | (ids >= vocabulary)
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        allowed = f"0 to {vocabulary - 1}, as the model's vocabulary has"
        raise ValueError(f"input_ids[{row}, {column}] is {int(ids[row, column])}; allowed: {allowed}")


def check_prompts(ids: Any, mask: Any) -> None:
    """Reject anything but ids `[B, T]` and a padding mask for them. Values are checked in `left_padded`."""
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


def check_device(ids: Tensor, mask: Tensor | None, device: torch.device | None) -> None:
    """Reject arguments that are not on the model's `device`. None: they may be on any."""
    if device is not None and ids.device != device:
        raise ValueError(f"input_ids is on {ids.device}; allowed: the model's device, {device}")
    if mask is not None and mask.device != ids.device:
        raise ValueError(f"attention_mask is on {mask.device}; allowed: the device of input_ids, {ids.device}")


def left_padded(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The prompts with their padding moved to the left, and their mask: int64, 1 where there is a token.

    As in transformers, any nonzero mask value means a token.
    """
    if mask is None:
        return ids, torch.ones_like(ids, dtype=torch.int64)
    mask = (mask != 0).to(torch.int64)
    empty = (mask.sum(1) == 0).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"attention_mask has no token in rows {empty}; allowed: one or more in each row")
    order = mask.argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)
