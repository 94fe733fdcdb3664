"""Which architecture CUDA kernels are chosen and compiled for: the GPU's own, or an older one that was asked for.

QFLASH_CUDA_ARCH=75 makes every kernel what it would be on a T4, but compiled to PTX, which the driver translates for
the GPU at hand: that is how code for older GPUs is run and tested on a newer one.
"""

from __future__ import annotations

import os
from functools import lru_cache

VARIABLE = "QFLASH_CUDA_ARCH"
# Architectures `qflash build` and the compile tests cover: one of each shared-memory size since Turing.
ARCHES = (75, 80, 86, 89, 90)


@lru_cache(maxsize=1)
def asked() -> int | None:
    """The architecture of QFLASH_CUDA_ARCH, or None. Read once: kernels for two architectures would not mix."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    if text not in map(str, ARCHES):
        raise ValueError(f"{VARIABLE} is {text!r}; allowed: {', '.join(map(str, ARCHES))}")
    return int(text)


def arch_for(capability: int) -> int:
    """The architecture to serve a GPU of compute capability `capability`/10 with."""
    wanted = asked()
    if wanted is None:
        return capability
    # Hopper's own instructions are in no later GPU: code for 90 is for 90 alone.
    served = [arch for arch in ARCHES if arch == capability or (arch < capability and arch != 90)]
    if wanted not in served:
        allowed = ", ".join(map(str, served)) or "none"
        raise ValueError(
            f"{VARIABLE} is {wanted}, this GPU has compute capability {capability / 10}; allowed: {allowed}"
        )
    return wanted
