"""The architecture that CUDA kernels are chosen and compiled for: the GPU's own, or a requested older one.

With QFLASH_CUDA_ARCH=75 every kernel is the one that would run on a T4, but compiled to PTX, which the driver
translates for the actual GPU. This is how code for older GPUs is run and tested on a newer one.
"""

from __future__ import annotations

import os
from functools import lru_cache

VARIABLE = "QFLASH_CUDA_ARCH"
# Architectures covered by `qflash build` and the compile tests: one for each shared-memory size since Turing.
ARCHES = (75, 80, 86, 89, 90)


@lru_cache(maxsize=1)
def asked() -> int | None:
    """The architecture of QFLASH_CUDA_ARCH, or None. Read once: kernels for two architectures cannot be mixed."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    if text not in map(str, ARCHES):
        raise ValueError(f"{VARIABLE} is {text!r}; allowed: {', '.join(map(str, ARCHES))}")
    return int(text)


def arch_for(capability: int) -> int:
    """The architecture whose kernels a GPU of compute capability `capability`/10 runs."""
    wanted = asked()
    if wanted is None:
        return capability
    # No later GPU has Hopper's own instructions: code for 90 runs only on 90.
    served = [arch for arch in ARCHES if arch == capability or (arch < capability and arch != 90)]
    if wanted not in served:
        allowed = ", ".join(map(str, served)) or "none"
        raise ValueError(
            f"{VARIABLE} is {wanted}, this GPU has compute capability {capability / 10}; allowed: {allowed}"
        )
    return wanted
