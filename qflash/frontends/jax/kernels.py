"""Kernels as XLA programs refer to them: by a text key from which any process can obtain an address."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import astuple, replace

import jax

from qflash import _native, backends, dispatch
from qflash.backends import Entry
from qflash.backends.arch import arch_for, asked
from qflash.call.spec import Spec

TARGET = "qflash_call"  # XLA's name for the handler

if not hasattr(_native, "xla_targets"):
    raise ImportError(
        "qflash was built without its JAX handlers: no jaxlib was found at build time. "
        "Install jaxlib, then rebuild qflash (pip install --no-build-isolation --force-reinstall qflash)"
    )


def register(kernel: str, spec: Spec, entry: Entry, takes: str) -> str:
    """Register a loaded kernel with the handler; returns the key by which programs refer to it. `takes`: its struct."""
    key = json.dumps([_native.ABI, takes, kernel, *astuple(spec)], separators=(",", ":"))
    _register(key, takes, entry)
    return key


def _register(key: str, takes: str, entry: Entry) -> None:
    _native.register_xla_kernel(key, entry.address, entry.status_text, entry.workspace, takes, entry.context)


def resolve(key: str) -> None:
    """Load the kernel of a key that this process has not seen: its program was compiled in another process."""
    abi, *words = json.loads(key)
    if abi != _native.ABI:
        raise ValueError(f"the program was compiled with qflash ABI {abi}; allowed: {_native.ABI}. Lower it again")
    takes, kernel, *fields = words
    if len(fields) != len(dataclasses.fields(Spec)):
        raise ValueError("the program was compiled with another version of qflash; allowed: this one. Lower it again")
    spec = Spec(*fields)
    if spec.device == "cuda":
        spec = replace(spec, arch=cuda_arch())  # the GPU here may differ from the one the program was lowered for
    entry = backends.load(dispatch.choose(spec, kernel), spec)
    assert isinstance(entry, Entry)  # otherwise the program would not have been lowered
    _register(key, takes, entry)


def arch_of_device(device: jax.Device) -> int:
    """Compute capability times ten of a CUDA device (or the value of QFLASH_CUDA_ARCH); 0 for any other."""
    if platform_of(device) != "cuda":
        return 0
    major, _, minor = device.compute_capability.partition(".")
    return arch_for(10 * int(major) + int(minor or 0))


def platform_of(device: jax.Device) -> str:
    """A device's platform by its qflash name: JAX calls CUDA "gpu"."""
    return "cuda" if device.platform == "gpu" else device.platform


def cuda_arch() -> int:
    """`arch_of_device` of this process's GPUs; without one, QFLASH_CUDA_ARCH (to lower for export)."""
    try:
        return arch_of_device(jax.local_devices(backend="cuda")[0])
    except RuntimeError as error:
        if (arch := asked()) is not None:
            return arch
        raise RuntimeError(
            "lowering qflash for CUDA needs a GPU's compute capability and JAX sees no GPU here; "
            "set QFLASH_CUDA_ARCH, e.g. 90 for Hopper"
        ) from error


for _name, _platform, _handler in _native.xla_targets():
    jax.ffi.register_ffi_target(_name, _handler, platform=_platform)
_native.set_xla_resolver(resolve)
