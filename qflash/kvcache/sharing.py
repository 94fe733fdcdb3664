"""Whether a prefix that sequences share is worth reading once (`qflash.share_prefix`): an estimate.

To share it costs a pass over the prefix by itself and a merge, two launches more. To read it for each sequence costs
its bytes again for all sequences but one.
"""

from __future__ import annotations

from typing import Any

# Measured on an H200, heads of 128 channels in 16 bits (python -m bench.words): where 96 to 126 MiB are not read again,
# calls run at 0.56 to 0.85 of the speed, because L2 serves what several sequences read; from 384 MiB on at 1.1 to 2.6.
# Nothing between them was measured.
LEAST_GPU_BYTES = 256 << 20
# Two to four sequences with prefixes of 256 to 1024 tokens took as long either way, on two cores.
LEAST_CPU_BYTES = 6 << 20


def pays(sequences: int, prefix_bytes: int, device: Any) -> bool:
    """Whether the bytes that are not read again take longer than what sharing adds. device: the cache's."""
    kinds = (getattr(device, "type", None), getattr(device, "platform", None))  # of torch, and of JAX
    least = LEAST_GPU_BYTES if "cuda" in kinds or "gpu" in kinds else LEAST_CPU_BYTES
    return (sequences - 1) * prefix_bytes > least
