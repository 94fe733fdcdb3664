"""One small problem for every CUDA kernel, on the CPU: what `make check` asks of each, in seconds.

The other files of this folder are thorough, kernel by kernel.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.frontends.numpy import run as numpy_frontend_run
from qflash.reference import sm90_quantize as replay
from qflash.testing import Case
from qflash.testing.emulated_attention import check_kernel
from qflash.testing.emulated_backward import check_gradients_of
from qflash.testing.emulated_linear import check_tile
from qflash.testing.op_cases import CASES, check_close
from qflash.testing.page_writes import PageWrite, arrays_of, check_written
from qflash.testing.row_gradients import GRADIENTS, gradient_call

CUDA = {row.name: row for row in dispatch.KERNELS if row.backend == "cuda"}
ATTENTION = [name for name, row in CUDA.items() if row.op == "attention"]
BACKWARD = [name for name, row in CUDA.items() if row.op == "attention_backward"]
QUANTIZE_KV = [name for name, row in CUDA.items() if row.op == "quantize_kv"]
KV_WRITE = [name for name, row in CUDA.items() if row.op == "kv_write"]
ROW_GRADIENTS = [name for name, row in CUDA.items() if row.op in GRADIENTS]
OTHERS = [name for name, row in CUDA.items() if row.op in CASES and row.op != "attention"]
LINEAR = [name for name, row in CUDA.items() if row.op.startswith("linear") and name not in OTHERS]
# More queries and keys than a tile has, of the dtype and head_dim whose libraries other tests here compile, too.
TILE = Case("tile", 70, 150, 2, 1, 64, causal=True, dtype="float16", seed=3)


def test_every_kernel_has_its_tile():
    known = (*ATTENTION, *BACKWARD, *QUANTIZE_KV, *KV_WRITE, *OTHERS, *LINEAR, *ROW_GRADIENTS)
    assert sorted(known) == sorted(CUDA)


@pytest.mark.parametrize("kernel", ATTENTION)
def test_attention(library, kernel):
    assert check_kernel(library, TILE, kernel) is not None


@pytest.mark.parametrize("kernel", BACKWARD)
def test_gradients(library, kernel):
    check_gradients_of(library, TILE, kernel)


@pytest.mark.parametrize("kernel", OTHERS)
def test_operation(request, kernel):
    case = next(case for case in CASES.values() if case.op == CUDA[kernel].op and kernel in case.kernels("cuda"))
    wanted = case.call(**case.arrays)  # by the CPU engine
    gpu = request.getfixturevalue("gpu")
    check_close(case.call(**case.arrays, kernel=kernel), wanted)
    assert gpu.launched == [kernel]


@pytest.mark.parametrize("kernel", LINEAR)
def test_linear(shared_cache, gpu, kernel):
    if CUDA[kernel].precision == "native":
        check_tile(shared_cache, kernel)
        return
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((130, 150), (150, 140)))
    got = qflash.int8_matmul(a, b, kernel=kernel)
    np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32))
    assert gpu.launched == [kernel]


@pytest.mark.parametrize("kernel", ROW_GRADIENTS)
def test_gradients_of_rows(gpu, kernel):
    op, arrays, words = gradient_call(CUDA[kernel].op)
    wanted = numpy_frontend_run(op, arrays, words)  # by the CPU engine
    check_close(gpu.run(op, arrays, words), wanted)
    assert gpu.launched == [kernel]


@pytest.mark.parametrize("kernel", QUANTIZE_KV)
def test_quantize_kv(gpu, kernel):
    rng = np.random.default_rng(4)
    k, v = (rng.standard_normal((1, 70, 2, 64), np.float32).astype(np.float16) for _ in range(2))
    got, want = qflash.quantize_kv(k, v, precision="int8_fp8", kernel=kernel), replay.quantize_kv(k, v)
    names = [field.name for field in fields(want)]
    assert names
    for name in names:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    assert gpu.launched == [kernel]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kernel", KV_WRITE)
def test_kv_write(gpu, kernel, int8):
    x = arrays_of(PageWrite("float16", int8, rope="half", mean=int8))
    wanted = x.replay()
    kv = qflash.PagedKV(**x.pools, page_table=x.page_table, lens=x.lens, k_mean=x.k_mean)
    assert qflash.paged_write(kv, x.k, x.v, rope=x.rope, kernel=kernel) is kv
    check_written(x, wanted)
    assert gpu.launched == [kernel]
