"""Ways to generate text with a model of transformers, each as a call that also records the time of the first token."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

PAGE = 256
Change = Literal["", "joined", "int8"]


@dataclass
class First:
    """The logits of the first new token, and when the device had them."""

    logits: Any = None
    at: float = 0.0

    def note(self, logits: Any) -> None:
        """Record the first call of a run; later ones are ignored."""
        if self.logits is None:
            synchronize(logits)
            self.at = time.perf_counter()
            self.logits = logits[:2].detach().float().clone()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """A logits processor for transformers, which adds no launch."""
        self.note(scores)
        return scores


Generate = Callable[[Any, int, First], Any]  # ids, number of new tokens -> the new tokens, [B, n]


@dataclass(frozen=True)
class Contender:
    """`change` modifies the model permanently, before `start(model, ids, count)` returns the call to time."""

    key: str
    name: str
    start: Callable[[Any, Any, int], Any]  # a context manager of Generate
    change: Change = ""
    int8_pages: bool = False
    pages: bool = True
    is_prepared: bool = True  # it compiles or captures for a number of tokens; else a few are enough to warm it up


@contextmanager
def _transformers(model: Any, ids: Any, count: int, static: bool = False) -> Iterator[Generate]:
    _forget(model)
    words = {"cache_implementation": "static"} if static else {}

    def generate(ids: Any, count: int, first: First) -> Any:
        out = model.generate(ids, max_new_tokens=count, do_sample=False, logits_processor=[first], **words)
        if static:
            generate.reason = "" if "_compiled_call" in vars(model) else "not compiled"  # type: ignore[attr-defined]
        return out[:, ids.shape[1] :]

    try:
        yield generate
    finally:
        _forget(model)


def _forget(model: Any) -> None:
    """Remove what transformers keeps from other batches: a static cache never becomes shorter than an earlier one, and
    a compiled step would serve several sizes, which makes it slower."""
    import torch

    for name in ("_previous_max_cache_length", "_cache", "_compiled_call"):
        vars(model).pop(name, None)
    torch.compiler.reset()
    gc.collect()


@contextmanager
def _qflash(model: Any, ids: Any, count: int, precision: Literal["int8"] | None = None) -> Iterator[Generate]:
    from qflash.integrations.transformers import Decoder

    pages = ids.shape[0] * -(-(ids.shape[1] + count) // PAGE)
    decoder = Decoder(model, pages=pages, page_size=PAGE, cache_precision=precision)
    forward = decoder.forward

    def generate(ids: Any, count: int, first: First) -> Any:
        def noted(*arguments: Any) -> Any:
            logits = forward(*arguments)
            if first.logits is None:
                first.note(logits)
            return logits

        decoder.forward = noted  # type: ignore[method-assign]
        result = decoder.generate(ids, max_new_tokens=count, eos_token_id=())
        generate.reason = result.reason  # type: ignore[attr-defined]
        return result.new_tokens

    yield generate


def _static(model: Any, ids: Any, count: int) -> Any:
    return _transformers(model, ids, count, static=True)


@contextmanager
def _static_by_qflash(model: Any, ids: Any, count: int) -> Iterator[Generate]:
    """transformers' own loop and compiler, with our operators."""
    from qflash.integrations.transformers import register

    register()
    before = model.config._attn_implementation
    model.set_attn_implementation("qf")
    try:
        with _transformers(model, ids, count, static=True) as generate:
            yield generate
    finally:
        model.set_attn_implementation(before)


def _int8_pages(model: Any, ids: Any, count: int) -> Any:
    return _qflash(model, ids, count, "int8")


HF, STATIC = "HF default", "HF static, compiled"
CONTENDERS = {
    one.key: one
    for one in (
        Contender("hf", HF, _transformers, pages=False, is_prepared=False),
        Contender("hf-static", STATIC, _static, pages=False),
        Contender("qflash-static", "qflash in HF static, compiled", _static_by_qflash, pages=False),
        Contender("qflash", "qflash", _qflash),
        Contender("qflash-kv8", "qflash, INT8 KV", _int8_pages, int8_pages=True),
        Contender("qflash-joined", "qflash, joined", _qflash, "joined"),
        Contender("qflash-joined-kv8", "qflash, joined, INT8 KV", _int8_pages, "joined", int8_pages=True),
        Contender("qflash-int8", "qflash, INT8 linear", _qflash, "int8"),
        Contender("qflash-int8-kv8", "qflash, INT8 linear, INT8 KV", _int8_pages, "int8", int8_pages=True),
    )
}
CHANGES: tuple[Change, ...] = ("", "joined", "int8")


def changed(model: Any, change: Change) -> bool:
    """Apply a change of contenders to a model; False: there is nothing to change."""
    from qflash.integrations.transformers import fuse_projections, quantize_linears

    if change == "joined":
        return bool(fuse_projections(model))
    if change == "int8":
        quantize_linears(model)  # merges the same layers
    return True


def synchronize(x: Any) -> None:
    """Wait for the device of an array."""
    if x.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
