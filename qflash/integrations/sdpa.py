"""`scaled_dot_product_attention` as PyTorch has it, and the way to put it in PyTorch's place. Imports no framework."""

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
    """How many calls of scaled_dot_product_attention qflash served, and how many PyTorch did, by reason.

    Eager calls are counted as they are made. A call inside code that torch.compile traces is counted each time it is
    traced, not each time the program runs; Dynamo may trace a call more than once before it is content.
    """

    served: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        others = self.fallbacks.total()
        lines = [f"qflash served {self.served} of {self.served + others} calls of scaled_dot_product_attention"]
        lines += [f"PyTorch served {count}: {reason}" for reason, count in self.fallbacks.most_common()]
        return "\n".join(lines)


totals = Report()
"""What is counted while no `replace_sdpa` is in place."""


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
    """torch.nn.functional.scaled_dot_product_attention on qflash's kernels: the same arguments, the same meaning.

    query: `[..., Hq, Tq, D]`; key, value: `[..., Hkv, Tk, D]`; two dimensions or more, which are broadcast as PyTorch
    broadcasts them. With enable_gqa Hq may be a multiple of Hkv. is_causal is aligned to the top left, as in PyTorch:
    query i sees keys `j <= i`. (`qflash.attention` and flash-attn align to the bottom right.)

    Served are float32, float16 and bfloat16 with a head_dim of 1 to 256, the same for query, key and value, and
    dropout_p = 0. attn_mask may be None, or a `torch.nn.attention.bias` of causal_upper_left or causal_lower_right.
    Gradients are served where `qflash.attention` has them: on the CPU. The choice of torch.nn.attention.sdpa_kernel
    is heeded by PyTorch alone.

    What is not served raises NotImplementedError (NoKernelError where no kernel serves the problem), or, with
    fallback=True, is computed by PyTorch. Such calls are counted by the Report of the `replace_sdpa` in place, or by
    `qflash.integrations.sdpa.totals`. Arguments that PyTorch would refuse as well raise ValueError or TypeError; with
    fallback=True PyTorch refuses them in its own words.

    The result is a `[B, T, H, D]` array seen as `[B, H, T, D]`, as PyTorch's memory-efficient kernel returns it, so
    that `.transpose(1, 2).reshape(B, T, H * D)` copies nothing. With two or three dimensions it is contiguous, unless
    enable_gqa is set.

    Example:
        >>> import torch
        >>> import qflash
        >>> q = torch.randn(1, 8, 128, 64)
        >>> qflash.scaled_dot_product_attention(q, q, q, is_causal=True).shape
        torch.Size([1, 8, 128, 64])
    """
    # In this form the statement costs half of what `from qflash.integrations import sdpa_torch` does on every call.
    import qflash.integrations.sdpa_torch as sdpa_torch

    out: TorchT = sdpa_torch.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, fallback)
    return out


@contextmanager
def replace_sdpa(*, fallback: bool = False) -> Iterator[Report]:
    """Put qflash in place of torch.nn.functional.scaled_dot_product_attention, for a model one did not write.

    fallback: see `scaled_dot_product_attention`. The replacement holds for all threads of the process. Contexts may
    be nested or entered by several threads: the one entered last decides and counts, and what was there before the
    first comes back after the last.

    Reached is every call that looks the function up in torch.nn.functional: `F.scaled_dot_product_attention(...)`,
    torch.nn.MultiheadAttention and the Transformer layers (their fused inference path, which never calls it, is
    switched off meanwhile). Not reached are names bound before (`from torch.nn.functional import
    scaled_dot_product_attention`), calls of torch.ops.aten, TorchScript and exported programs, and C++. A compiled
    model is best compiled and used inside: torch.compile notices the replacement in one's own code, but not where the
    call is made by torch's modules, and there a program stays as it was traced until `torch.compiler.reset()`.

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
