"""Whether it pays off to read a prefix shared by sequences once (`qflash.share_prefix`): an estimate.

Sharing costs a separate pass over the prefix and a merge, two additional launches. Reading the prefix for each sequence
costs its bytes again for all sequences but one.
"""

from __future__ import annotations

from typing import Any

# Measured on an H200, heads of 128 channels in 16 bits (python -m bench.words): if sharing saves reading 96 to 126 MiB,
# calls run at 0.56 to 0.85 of the speed, because L2 supplies what several sequences read; from 384 MiB on, at 1.1 to
# 2.6. Nothing in between was measured.
LEAST_GPU_BYTES = 256 << 20
# Two to four sequences with prefixes of 256 to 1024 tokens took as long either way, on two cores.
LEAST_CPU_BYTES = 6 << 20


def pays(sequences: int, prefix_bytes: int, device: Any) -> bool:
    """Whether reading the saved bytes would take longer than what sharing adds. device: the cache's."""
    kinds = (getattr(device, "type", None), getattr(device, "platform", None))  # for torch, and for JAX
    least = LEAST_GPU_BYTES if "cuda" in kinds or "gpu" in kinds else LEAST_CPU_BYTES
    return (sequences - 1) * prefix_bytes > least
