"""What torch.utils.flop_counter counts for qflash's ops: the products of matrices, as it counts PyTorch's own.

As there, a mask takes nothing off. A packed call counts each sequence by itself where its lengths can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._subclasses.fake_tensor import is_fake
from torch.utils import flop_counter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from qflash.frontends.torch_launch import Extras
from qflash.frontends.torch_ops import attention_op, backward_op

_PRODUCTS = {"forward": 2, "backward": 5}  # Q Kᵀ and P V; backward again Q Kᵀ, dO Vᵀ, and those of dQ, dK, dV


def _attention(direction: str, q: Any, k: Any, words: Sequence[Any]) -> int:
    extras = Extras(*words[: len(Extras._fields)])
    *_, heads, head_dim = q.shape
    if extras.cu_seqlens_q is None:
        scores = q.shape[0] * q.shape[1] * k.shape[1]
    elif is_fake(extras.cu_seqlens_q) or is_fake(extras.cu_seqlens_k) or extras.cu_seqlens_q.is_meta:
        scores = (extras.cu_seqlens_q.shape[0] - 1) * extras.max_seqlen_q * extras.max_seqlen_k
    else:
        lengths = (x.diff().tolist() for x in (extras.cu_seqlens_q, extras.cu_seqlens_k))
        scores = sum(q_len * k_len for q_len, k_len in zip(*lengths, strict=True))
    return 2 * _PRODUCTS[direction] * scores * heads * head_dim


def _forward_flops(q: Any, k: Any, v: Any, *words: Any, out_val: Any = None, **_: Any) -> int:
    return _attention("forward", q, k, words)


def _backward_flops(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *words: Any, **_: Any) -> int:
    return _attention("backward", q, k, words)


def count(op: Any, formula: Any) -> None:
    """Have `formula` count `op`, with the arguments of the op, from now on.

    A counter copies the known formulas when it is made, and qflash is loaded by the first call: counters that watch
    that very call are told too.
    """
    flop_counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            registry.setdefault(op, flop_counter.flop_registry[op])


count(attention_op.overloadpacket, _forward_flops)
count(backward_op.overloadpacket, _backward_flops)
