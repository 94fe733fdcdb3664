"""`scaled_dot_product_attention` on qflash, and a context manager that replaces PyTorch's. Imports no framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from qflash.typing import TorchTensor

TorchT = TypeVar("TorchT", bound=TorchTensor)


@dataclass(eq=False)
class Report:
    """Counts of scaled_dot_product_attention calls: those that qflash served, and those that PyTorch did, by reason.

    Eager calls are counted when they are made. A call in code traced by torch.compile is counted each time it is
    traced, not each time the program runs, and Dynamo may trace a call more than once.
    """

    served: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        others = self.fallbacks.total()
        lines = [f"qflash served {self.served} of {self.served + others} calls of scaled_dot_product_attention"]
        lines += [f"PyTorch served {count}: {reason}" for reason, count in self.fallbacks.most_common()]
        return "\n".join(lines)


totals = Report()
"""Counts the calls made outside any `replace_sdpa` context."""


def scaled_dot_product_attention(
    query: TorchT,
    key: TorchTensor,
    value: TorchTensor,
    attn_mask: TorchTensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    fallback: bool = False,
) -> TorchT:
    """Drop-in replacement for torch.nn.functional.scaled_dot_product_attention that runs qflash's kernels.

    The arguments and their meaning are PyTorch's: is_causal is aligned to the top left, so query i sees keys `j <= i`.
    (`qflash.attention` and flash-attn align to the bottom right.)

    Args:
        query: `[..., Hq, Tq, D]`, two dimensions or more, which broadcast as in PyTorch. All three tensors are float32,
            float16 or bfloat16, with the same D from 1 to 256.
        key: `[..., Hkv, Tk, D]`.
        value: `[..., Hkv, Tk, D]`.
        attn_mask: None, or a `torch.nn.attention.bias` of causal_upper_left or causal_lower_right.
        dropout_p: 0.0.
        is_causal: whether to apply a causal mask.
        scale: factor applied to q · k. Default: `1 / sqrt(D)`.
        enable_gqa: allows Hq to be a multiple of Hkv.
        fallback: whether PyTorch computes the calls that qflash does not support.

    Returns:
        A `[B, T, H, D]` array viewed as `[B, H, T, D]`, as PyTorch's memory-efficient kernel returns it, so
        `.transpose(1, 2).reshape(B, T, H * D)` copies nothing. With two or three dimensions it is contiguous, unless
        enable_gqa is set.

    Raises:
        NotImplementedError: the call is not supported (NoKernelError if no kernel supports the problem). With
            fallback=True PyTorch computes it instead; such calls are counted by the Report of the active
            `replace_sdpa`, or by `qflash.integrations.sdpa.totals`.
        ValueError, TypeError: PyTorch would reject the arguments too. With fallback=True PyTorch raises its own error.

    Gradients are supported where `qflash.attention` supports them. The backend selected by
    torch.nn.attention.sdpa_kernel affects only PyTorch's own computation.

    Example:
        >>> import torch
        >>> import qflash
        >>> q = torch.randn(1, 8, 128, 64)
        >>> qflash.scaled_dot_product_attention(q, q, q, is_causal=True).shape
        torch.Size([1, 8, 128, 64])
    """
    # This form of the import statement costs half as much per call as `from qflash.integrations import sdpa_torch`.
    import qflash.integrations.sdpa_torch as sdpa_torch

    out: TorchT = sdpa_torch.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, fallback)
    return out


@contextmanager
def replace_sdpa(*, fallback: bool = False) -> Iterator[Report]:
    """Replace torch.nn.functional.scaled_dot_product_attention with qflash's, for models whose code you do not change.

    The replacement applies to all threads of the process. Contexts may be nested, or entered by several threads: the
    one entered last is active and counts, and the last one to exit restores what was there before the first.

    It affects every call that looks the function up in torch.nn.functional: `F.scaled_dot_product_attention(...)`,
    torch.nn.MultiheadAttention and the Transformer layers (their fused inference path, which never calls it, is
    disabled meanwhile). It does not affect names bound earlier (`from torch.nn.functional import
    scaled_dot_product_attention`), calls of torch.ops.aten, TorchScript, exported programs, or C++. Compile and run a
    compiled model inside the context: torch.compile notices the replacement in your own code, but not where torch's
    modules make the call; there a program stays as traced until `torch.compiler.reset()`.

    Args:
        fallback: see `scaled_dot_product_attention`.

    Yields:
        The `Report` that counts the calls.

    Example:
        >>> import torch
        >>> import qflash
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0)
        >>> with qflash.replace_sdpa(fallback=True) as report:
        ...     out = model(torch.randn(2, 16, 64))
        >>> print(report)
        qflash served 1 of 1 calls of scaled_dot_product_attention
    """
    import qflash.integrations.sdpa_torch as sdpa_torch

    report = Report()
    sdpa_torch.install(report, fallback)
    try:
        yield report
    finally:
        sdpa_torch.remove(report)
