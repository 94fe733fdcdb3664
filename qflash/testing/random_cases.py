"""Random problems. One generator, driven by a seed (no extra package) or by hypothesis (which also shrinks)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from qflash.call.spec import DTYPES
from qflash.testing.case import POSITIONS, Case, Rotary

_LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 191)
_HEAD_DIMS = (1, 2, 3, 4, 7, 8, 16, 20, 32, 33, 64, 72, 80, 96, 100, 128, 160, 192, 255, 256)


class Chooser(Protocol):
    """The source of choices. Simple choices come first, so that a shrinker finds the simple case."""

    def integer(self, low: int, high: int) -> int: ...

    def choice(self, options: Sequence[Any]) -> Any: ...


class Seeded:
    """Choices from a NumPy generator."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high, endpoint=True))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]


def random_case(chooser: Chooser, dtypes: Sequence[str] = DTYPES) -> Case:
    """One random problem: shapes, options, data and layout, in any combination that a user could write."""
    kv_heads = chooser.integer(1, 3)
    head_dim = chooser.choice(_HEAD_DIMS)
    words = {
        "q_heads": kv_heads * chooser.integer(1, 4),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": chooser.choice(dtypes),
        "causal": chooser.choice((False, True)),
        "window": chooser.choice((None, "drawn")),
        "softcap": chooser.choice((None, None, 1.0, 30.0)),
        "scale": chooser.choice((None, None, None, 0.0, -0.3, 0.5)),
        "rope": _random_rope(chooser, head_dim),
        "sinks": chooser.choice((None, None, ("0.5", "-2", "3"), ("7", "-inf", "-40"))),
        "data": chooser.choice(("normal", "normal", "biased_k", "outlier", "uniform", "large", "rising", "hills")),
        "seed": chooser.integer(0, 9999),
    }
    if words["window"]:
        words["window"] = (_random_edge(chooser), _random_edge(chooser))
    if chooser.choice((False, False, True)):
        return Case("random", **words, **_random_packed(chooser))
    return Case("random", **words, **_random_batch(chooser))


def random_cases(count: int, seed: int = 0, dtypes: Sequence[str] = DTYPES) -> Iterator[Case]:
    """`count` random problems from `seed`; the same seed gives the same problems."""
    for index in range(count):
        yield random_case(Seeded(seed * 1_000_003 + index), dtypes)


def _random_edge(chooser: Chooser) -> int:
    return chooser.choice((-1, 0, 1, 5, 16, 40, 100, 5000))


def _random_rope(chooser: Chooser, head_dim: int) -> Rotary | None:
    if head_dim < 2 or chooser.choice((False, True, False)):
        return None
    dim = chooser.choice((head_dim - head_dim % 2, 2, 2 * (head_dim // 4) or 2))
    return Rotary(dim, chooser.choice((False, True)), chooser.choice(POSITIONS))


def _random_batch(chooser: Chooser) -> dict[str, Any]:
    batch = chooser.integer(1, 3)
    q_len = chooser.choice(_LENGTHS)
    k_len = chooser.choice((q_len, *_LENGTHS))
    kv_lens = None
    if chooser.choice((False, True)):
        kv_lens = tuple(chooser.choice((k_len, 0, chooser.integer(0, k_len))) for _ in range(batch))
    layouts = ("bthd", "bhtd", "gaps", "one_batch") + (("fused",) if q_len == k_len else ())
    return {"batch": batch, "q_len": q_len, "k_len": k_len, "kv_lens": kv_lens, "layout": chooser.choice(layouts)}


def _random_packed(chooser: Chooser) -> dict[str, Any]:
    count = chooser.integer(0, 4)
    q_lens = tuple(chooser.choice(_LENGTHS) for _ in range(count))
    k_lens = tuple(chooser.choice((q, *_LENGTHS)) for q in q_lens)
    kv_lens = None
    if chooser.choice((False, False, True)):
        kv_lens = tuple(chooser.integer(0, k) for k in k_lens)
    return {"q_lens": q_lens, "k_lens": k_lens, "kv_lens": kv_lens, "layout": chooser.choice(("bthd", "bhtd", "gaps"))}
