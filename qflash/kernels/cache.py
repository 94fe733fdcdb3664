"""Rows of kernels for stored keys and values: quantization for Hopper, writes to pages, merging partial results."""

from __future__ import annotations

from qflash.kernels.kernel import HALVES, Kernel
from qflash.kernels.limits import copy_engine, whole_blocks_of_int8

CACHE: tuple[Kernel, ...] = (
    Kernel(
        name="sm90_quantize",
        device="cuda",
        summary="k, and v for E4M3, as sm90_int8 wants them: rope, smoothing, Hadamard matrix, integers in one pass",
        op="quantize_kv",
        dtypes=HALVES,
        precisions=("int8", "int8_fp8"),
        min_arch=90,
        later_arches=False,
        also=copy_engine,
        head_dims=(64, 128, 256),
        parts=3,
    ),
    Kernel(
        name="cpu_kv_write",
        device="cpu",
        summary="new k and v into the pages of a cache on all cores: rope, mean, Hadamard matrix, scales, integers",
        op="kv_write",
        page="kv_write",
        kvs=("pages", "pages_int8"),
        also=whole_blocks_of_int8,
    ),
    Kernel(
        name="kv_write",
        device="cuda",
        summary="new k and v into the pages of a cache: rope, mean, Hadamard matrix, scales, integers, one launch",
        op="kv_write",
        kvs=("pages", "pages_int8"),
        min_arch=75,
        also=whole_blocks_of_int8,
    ),
    Kernel(
        name="cpu_merge",
        device="cpu",
        summary="attention over two sets of keys merged by lse, row by row on all cores",
        op="merge",
        page="merge",
    ),
    Kernel(
        name="merge",
        device="cuda",
        summary="attention over two sets of keys merged by lse, four channels per thread",
        op="merge",
        min_arch=75,
    ),
)
