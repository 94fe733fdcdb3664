"""Whether a prefix that sequences share is worth reading once (`qflash.share_prefix`): an estimate.

To share it costs a pass over the prefix by itself and a merge, two launches more. To read it for each sequence costs
its bytes again for all sequences but one.
"""

from __future__ import annotations

from typing import Any

# By arithmetic, not measured: 6 µs for two launches, in which an H200 reads 26 MB at 4.4 TB/s. Eight sequences with a
# prefix of 1024 tokens of 8 heads of 128 channels in 16 bits read 29 MB more than one does.
LEAST_GPU_BYTES = 26 << 20
# Two to four sequences with prefixes of 256 to 1024 tokens took as long either way, on two cores.
LEAST_CPU_BYTES = 6 << 20


def pays(sequences: int, prefix_bytes: int, device: Any) -> bool:
    """Whether the bytes that are not read again take longer than what sharing adds. device: the cache's."""
    kinds = (getattr(device, "type", None), getattr(device, "platform", None))  # of torch, and of JAX
    least = LEAST_GPU_BYTES if "cuda" in kinds or "gpu" in kinds else LEAST_CPU_BYTES
    return (sequences - 1) * prefix_bytes > least
