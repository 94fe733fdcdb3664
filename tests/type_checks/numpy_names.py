"""The names that `import *` brings, as a type checker sees them."""

from collections.abc import Callable
from typing import assert_type

from qflash import *
from qflash import __version__


def uses() -> None:
    assert_type(__version__, str)
    assert_type(get_num_threads(), int)
    set_num_threads(get_num_threads())
    errors: list[type[Exception]] = [CompileError, KernelError, NoKernelError, OutOfPagesError, ToolchainError]
    calls: list[Callable[..., object]] = [attention, attention_varlen, explain, softmax, layer_norm, cross_entropy]
    calls += [
        int8_matmul,
        linear,
        swiglu,
        quantize_linear,
        merge,
        quantize,
        dequantize,
        quantize_kv,
        rope,
        rope_tables,
        share_prefix,
    ]
    classes: list[type[object]] = [
        Explanation,
        KVCache,
        PagedKV,
        Quantized,
        QuantizedKV,
        QuantizedLinear,
        Rope,
        SharedPrefixKV,
    ]
    assert all(map(callable, (*errors, *calls, *classes)))


def refused() -> None:
    set_num_threads("2")  # type: ignore[arg-type]
    from qflash import dispatch_table  # type: ignore[attr-defined]
    from qflash.ops.rows import run  # type: ignore[attr-defined]  # which another module defines


def run() -> None:
    uses()
