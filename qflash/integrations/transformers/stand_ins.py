"""Recognizes what a module computes by trying it on small arrays: names and sources change from release to release,
results do not. A module that does not compute exactly one of the formulas below is not recognized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor

_CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32 of numbers near 1; other formulas differ by far more
_EPS = ("variance_epsilon", "eps")


def norm_weight(module: nn.Module) -> Literal["w", "1 + w"] | None:
    """The factor by which a module multiplies x / rms(x), if it computes only that; None: it computes something else.

    Llama's has "w", Gemma's "1 + w".
    """
    eps = norm_eps(module)
    weight = module._parameters.get("weight")
    if eps is None or weight is None or weight.ndim != 1 or not _is_plain(module, ("weight",), ()):
        return None
    # Numbers small enough to show whether and where eps is added.
    x = _normal(3, 4, 8) * max(eps, 1e-12) ** 0.5
    w = 1 + 0.5 * _normal(8, seed=2)
    got = _tried(type(module).forward, _stand_in(module, {"weight": w}, {}), x)
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for formula, want in (("w", unit * w), ("1 + w", unit * (1 + w))):
        if _is_same(got, want):
            return formula
    return None


def norm_eps(module: nn.Module) -> float | None:
    """The value that a norm adds to the mean of squares."""
    found = [vars(module)[name] for name in _EPS if name in vars(module)]
    return found[0] if len(found) == 1 and isinstance(found[0], float) else None


def is_swiglu(module: nn.Module) -> bool:
    """Whether a module computes down_proj(silu(gate_proj(x)) · up_proj(x))."""
    names = ("gate_proj", "up_proj", "down_proj")
    if not set(names) <= set(module._modules) or not _is_plain(module, (), (*names, "act_fn")):
        return False
    children = {name: _random_linear(8, 12, seed) for seed, name in enumerate(names[:2])}
    children["down_proj"] = _random_linear(12, 8, 2)
    x = _normal(3, 4, 8)
    want = children["down_proj"](F.silu(children["gate_proj"](x)) * children["up_proj"](x))
    return _is_same(_tried(type(module).forward, _stand_in(module, {}, children), x), want.detach())


def is_tanh_gelu(module: nn.Module) -> bool:
    """Whether a module computes GeLU with tanh."""
    if not _is_plain(module, (), ()):
        return False
    x = torch.linspace(-6, 6, 101, dtype=torch.float32, device="cpu")
    return _is_same(_tried(type(module).forward, module, x), F.gelu(x, approximate="tanh"))


def rotation_tables(function: Callable[..., Any]) -> Literal["twice", "once"] | None:
    """The form in which `function(q, k, cos, sin)`, with q and k `[B, H, T, D]`, expects the tables of a rotation that
    pairs channel p with p + D/2: each angle "twice", `[B, T, D]`, or "once", `[B, T, D / 2]`. None: neither."""
    q, k = _normal(2, 4, 3, 8), _normal(2, 2, 3, 8, seed=1)
    # Cosines and sines here are unrelated, so formulas that differ give different results.
    cos, sin = _normal(2, 3, 4, seed=2), _normal(2, 3, 4, seed=3)
    want = [_rotated(x, cos[:, None], sin[:, None]) for x in (q, k)]
    for form, repeats in (("twice", 2), ("once", 1)):
        got = _tried(function, q, k, *(torch.cat([x] * repeats, -1) for x in (cos, sin)))
        if isinstance(got, tuple) and len(got) == 2 and all(map(_is_same, got, want)):
            return form
    return None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _is_plain(module: nn.Module, parameters: tuple[str, ...], modules: tuple[str, ...]) -> bool:
    """Whether a module has exactly these parts and no hooks."""
    is_hooked = any((module._forward_hooks, module._forward_pre_hooks, "forward" in vars(module)))
    parts = set(module._parameters) == set(parameters) and set(module._modules) == set(modules)
    return parts and not module._buffers and not is_hooked


def _stand_in(module: nn.Module, parameters: dict[str, Any], modules: dict[str, Any]) -> nn.Module:
    """The same module with other weights; the original keeps its own."""
    copy = type(module).__new__(type(module))
    copy.__dict__ = vars(module) | {"_parameters": dict(parameters), "_modules": {**module._modules, **modules}}
    return copy


def _tried(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result, or None if the function raises, as a different function may with such arguments."""
    try:
        with torch.no_grad():
            return function(*arguments)
    except Exception:
        return None


def _is_same(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, want, **_CLOSE)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


def _random_linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, device="meta")
    layer.weight = nn.Parameter(_normal(outputs, inputs, seed=2 * seed) * inputs**-0.5, requires_grad=False)
    layer.bias = nn.Parameter(_normal(outputs, seed=2 * seed + 1), requires_grad=False)
    return layer
