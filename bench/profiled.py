"""One call of an operation on a problem worth profiling: what ncu runs for kernels without their own binary.

python -m bench.profiled KERNEL
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import qflash
from qflash.dispatch import VARIANTS
from qflash.ops.linear import LINEAR
from qflash.ops.run import run
from qflash.testing import Case, runner
from qflash.testing.by_kernel import differentiated_by

ROWS, COLUMNS, SIDE = 16384, 8192, 4096
PAGE_SIZE = 256  # tokens


def _rows(torch: Any) -> Any:
    return torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.float16)


def _int8(torch: Any) -> Any:
    return torch.randint(-127, 128, (SIDE, SIDE), device="cuda", dtype=torch.int8)


def _linear_operands(torch: Any, *, requires_grad: bool = False) -> list[Any]:
    """x, w and bias."""
    inputs = COLUMNS // 4
    shapes = (ROWS, inputs), (COLUMNS, inputs), (COLUMNS,)
    x, w, bias = (
        torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=requires_grad) for shape in shapes
    )
    return [x, w.T, bias]


def _linear(torch: Any, kernel: str) -> Any:
    return qflash.linear(*_linear_operands(torch), activation="gelu", kernel=kernel)


def _linear_backward(torch: Any, kernel: str) -> Any:
    arrays = (*_linear_operands(torch, requires_grad=True), None)
    out, *_ = run(differentiated_by(LINEAR, kernel), arrays, ("gelu", None, False, None))
    return out.sum().backward()


def _heads(torch: Any) -> Any:
    return torch.randn(4, 4096, 16, 128, device="cuda", dtype=torch.float16)


def _lse(torch: Any) -> Any:
    return torch.randn(4, 16, 4096, device="cuda")


def _cross_entropy(torch: Any, kernel: str) -> Any:
    return qflash.cross_entropy(_rows(torch), torch.zeros(ROWS, device="cuda", dtype=torch.int64), kernel=kernel)


def _gradients(call: Callable[[Any, Any], Any]) -> Callable[[Any, str], Any]:
    """The gradients of call(torch, x), through autograd, which launches the backward kernels."""

    def run(torch: Any, kernel: str) -> Any:
        return call(torch, _rows(torch).requires_grad_()).sum().backward()

    return run


def _layer_norm(torch: Any, x: Any) -> Any:
    weight, bias = (x.new_ones(COLUMNS, requires_grad=True) for _ in range(2))
    return qflash.layer_norm(x, weight, bias)


def _losses(torch: Any, x: Any) -> Any:
    return qflash.cross_entropy(x, torch.zeros(ROWS, device="cuda", dtype=torch.int64))


def _rope(torch: Any, kernel: str) -> Any:
    tables = (torch.from_numpy(table).cuda() for table in qflash.rope_tables(4096, 128))
    return qflash.rope(_heads(torch), qflash.Rope(*tables), kernel=kernel)


def _quantize(torch: Any, kernel: str) -> Any:
    return qflash.quantize(_heads(torch), granularity="group", smooth=True, kernel=kernel)


def _attention_int8(torch: Any, kernel: str) -> Any:
    q = qflash.quantize(_heads(torch), granularity="token")
    k = qflash.quantize(_heads(torch), granularity="group", smooth=True)
    return qflash.attention(q, k, _heads(torch), kernel=VARIANTS[kernel].kernel.name)


def _queries(torch: Any, kernel: str) -> Any:
    """One per head for a decode kernel."""
    return _heads(torch)[:, -1:] if VARIANTS[kernel].kernel.few_rows else _heads(torch)


def _attention(torch: Any, kernel: str) -> Any:
    variant = VARIANTS[kernel]
    arrays = (_queries(torch, kernel), *(_heads(torch) for _ in "kv"))
    precision = None if variant.precision == "native" else variant.precision
    return qflash.attention(*arrays, precision=precision, kernel=variant.kernel.name)


def _attention_backward(torch: Any, kernel: str) -> Any:
    case = Case("profiled", 4096, 4096, 16, 16, 128, batch=4, dtype=VARIANTS[kernel].dtypes[0])
    return runner.CudaCall(*runner.planned_backward(case, kernel, "native-cuda")).run()


def _quantize_kv(torch: Any, kernel: str) -> Any:
    return qflash.quantize_kv(_heads(torch), _heads(torch), precision="int8_fp8", kernel=kernel)


def _pages(torch: Any, kernel: str, k: Any) -> qflash.PagedKV:
    """Pages for as many tokens as k has."""
    batch, length, heads, head_dim = k.shape
    columns = length // PAGE_SIZE
    int8 = VARIANTS[kernel].kv == "pages_int8"
    slots = (batch * columns, heads, PAGE_SIZE)
    pools = [k.new_zeros(*slots, head_dim, dtype=torch.int8 if int8 else k.dtype) for _ in "kv"]
    scales = [k.new_zeros(slots, dtype=torch.float32) if int8 else None for _ in "kv"]
    table = torch.arange(batch * columns, dtype=torch.int32, device="cuda").view(batch, columns)
    return qflash.PagedKV(*pools, table, torch.full((batch,), length, dtype=torch.int32, device="cuda"), *scales)


def _kv_write(torch: Any, kernel: str) -> Any:
    k = _heads(torch)
    return qflash.paged_write(_pages(torch, kernel, k), k, k, kernel=VARIANTS[kernel].kernel.name)


def _attention_pages(torch: Any, kernel: str) -> Any:
    k = _heads(torch)
    kv = qflash.paged_write(_pages(torch, kernel, k), k, k)
    return qflash.attention(_queries(torch, kernel), kv, kernel=VARIANTS[kernel].kernel.name)


def _attention_kv(torch: Any, kernel: str) -> Any:
    kv = qflash.quantize_kv(_heads(torch), _heads(torch), precision=VARIANTS[kernel].precision)
    return qflash.attention(_queries(torch, kernel), kv, kernel=VARIANTS[kernel].kernel.name)


# Operation, with the kind of k and v if these are not arrays -> (description of the problem, the call).
OPERATIONS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "softmax": (f"{ROWS}x{COLUMNS} float16", lambda torch, kernel: qflash.softmax(_rows(torch), kernel=kernel)),
    "layer_norm": (f"{ROWS}x{COLUMNS} float16", lambda torch, kernel: qflash.layer_norm(_rows(torch), kernel=kernel)),
    "cross_entropy": (f"{ROWS}x{COLUMNS} float16", _cross_entropy),
    "softmax_backward": (f"{ROWS}x{COLUMNS} float16", _gradients(lambda torch, x: qflash.softmax(x))),
    "layer_norm_backward": (f"{ROWS}x{COLUMNS} float16", _gradients(_layer_norm)),
    "cross_entropy_backward": (f"{ROWS}x{COLUMNS} float16", _gradients(_losses)),
    "linear": (
        f"{ROWS}x{COLUMNS}x{COLUMNS // 4} float16, w along k, bias, gelu",
        _linear,
    ),
    "linear_backward": (
        f"{ROWS}x{COLUMNS}x{COLUMNS // 4} float16, w along k, bias, gelu",
        _linear_backward,
    ),
    "linear int8": (
        f"{SIDE}x{SIDE}x{SIDE}, b along k",
        lambda torch, kernel: qflash.int8_matmul(_int8(torch), _int8(torch).T, kernel=VARIANTS[kernel].kernel.name),
    ),
    "quantize": ("B=4 T=4096 H=16 D=128 float16, row groups, smoothed", _quantize),
    "dequantize": (
        "B=4 T=4096 H=16 D=128 to float16",
        lambda torch, kernel: qflash.dequantize(qflash.quantize(_heads(torch)), kernel=kernel),
    ),
    "merge": (
        "B=4 T=4096 H=16 D=128 float16",
        lambda torch, kernel: qflash.merge(*[_heads(torch), _lse(torch)] * 2, kernel=kernel),
    ),
    "rope": ("B=4 T=4096 H=16 D=128 float16", _rope),
    "attention quantized": ("B=4 T=4096 H=16 D=128 float16, row groups, smoothed, full", _attention_int8),
    "attention": ("B=4 T=4096 H=16 D=128 full float16", _attention),
    **{
        f"attention {kv}": (
            f"B=4 T=4096 H=16 D=128 full float16, pages of {PAGE_SIZE}",
            _attention_pages,
        )
        for kv in ("pages", "pages_int8")
    },
    "attention_backward": ("B=4 T=4096 H=16 D=128 full, float16 or, of fa_bwd, float32", _attention_backward),
    "quantize_kv": ("B=4 T=4096 H=16 D=128 float16, int8_fp8", _quantize_kv),
    "kv_write": (f"B=4 T=4096 H=16 D=128 float16, pages of {PAGE_SIZE}", _kv_write),
    "attention kept": (
        "B=4 T=4096 H=16 D=128 float16, k and v quantized before, full",
        _attention_kv,
    ),
}


def operation_of(kernel: str) -> str:
    """The key of OPERATIONS for a variant of a kernel."""
    variant = VARIANTS[kernel]
    op = variant.kernel.op
    if op == "linear" and variant.precision != "native":
        return f"{op} {variant.precision}"
    return op if op != "attention" or variant.kv == "arrays" else f"{op} {variant.kv}"


def problem_of(kernel: str) -> str:
    """A description of what `main` computes."""
    return OPERATIONS[operation_of(kernel)][0] + (", one query" if VARIANTS[kernel].kernel.few_rows else "")


def main(kernel: str) -> None:
    import torch

    OPERATIONS[operation_of(kernel)][1](torch, kernel)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
