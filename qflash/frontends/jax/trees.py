"""The objects that calls take and return, registered as pytrees for jit, vmap and scan."""

from __future__ import annotations

import jax

from qflash.ops.kv import QuantizedKV
from qflash.ops.linear_weights import QuantizedLinear
from qflash.ops.paged import PagedKV
from qflash.ops.prefix import SharedPrefixKV
from qflash.ops.quantization import Quantized
from qflash.rotary import Rope

jax.tree_util.register_dataclass(
    Rope, data_fields=["cos", "sin", "positions_q", "positions_k"], meta_fields=["interleaved"]
)
jax.tree_util.register_dataclass(
    Quantized,
    data_fields=["values", "scale", "zero_point", "mean", "sums"],
    meta_fields=["granularity", "group", "symmetric", "dtype"],
)
jax.tree_util.register_dataclass(
    QuantizedKV,
    data_fields=[
        "k",
        "k_scale",
        "k_mean",
        "k_nonfinite",
        "v",
        "v_scale",
        "v_exponents",
        "v_nonfinite",
        "v_mean",
        "lens",
    ],
    meta_fields=["dtype", "precision"],
)
jax.tree_util.register_dataclass(
    PagedKV,
    data_fields=["k_pages", "v_pages", "page_table", "lens", "k_scale", "v_scale", "k_mean"],
    meta_fields=["layout"],
)
jax.tree_util.register_dataclass(SharedPrefixKV, data_fields=["whole", "prefix", "rest", "last"], meta_fields=[])
jax.tree_util.register_dataclass(QuantizedLinear, data_fields=["values", "scale"], meta_fields=["dtype"])
