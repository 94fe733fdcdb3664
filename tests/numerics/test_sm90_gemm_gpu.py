"""`sm90_gemm` on a GPU: what the emulator ran (tests/emulated/test_emulated_sm90_gemm.py), at sizes that fill a GPU,
and the same bits again and again while others use it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qflash.call.spec import ACTIVATIONS
from qflash.testing import cuda_gemm
from qflash.testing.gemm_case import GemmCase

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", ["sm90_gemm"])]
# One element, few rows, whole tiles and one more, bands of tiles, an odd number of row tiles, problems that are split,
# whole or in their last wave.
SHAPES = [
    (1, 1, 1), (1, 17, 3), (33, 1, 129), (1, 4096, 4096), (16, 1000, 4096), (17, 4096, 1000), (64, 128, 8192),
    (127, 257, 500), (128, 256, 64), (129, 255, 127), (385, 1000, 640), (512, 4096, 1024), (2500, 3000, 700),
    (4224, 1100, 200), (300, 9000, 2048), (1300, 3584, 4000),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "w_along"), [("float16", "k"), ("bfloat16", "n"), ("int8", "k")])
def test_every_shape(kernel, dtype, w_along, shape):
    cuda_gemm.check(GemmCase(*shape, dtype, w_along=w_along), kernel)


@pytest.mark.parametrize("more", ["", "pre", "residual", "pre residual"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_follows_a_product(kernel, activation, out_dtype, more):
    words = {"activation": activation, "pre": "pre" in more, "residual": "residual" in more, "bias": "float32"}
    for shape in ((700, 1000, 130), (700, 999, 131), (20, 2000, 2000)):
        cuda_gemm.check(GemmCase(*shape, "bfloat16", out_dtype, w_along="n", **words), kernel)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_follows_a_product_of_integers(kernel, activation, out_dtype):
    """To the bit, where there is no activation and no residual."""
    words = {"activation": activation, "scales": "each", "bias": "float32", "pre": bool(activation)}
    for shape in ((700, 1000, 1300), (9, 131, 3000)):
        cuda_gemm.check(GemmCase(*shape, "int8", out_dtype, **words), kernel)
        cuda_gemm.check(GemmCase(*shape, "int8", out_dtype, **{**words, "residual": True}), kernel)


@pytest.mark.parametrize(
    ("gaps", "offsets"), [((8, 16, 8), (0, 0, 0)), ((1, 0, 0), (0, 0, 0)), ((0, 3, 1), (0, 0, 0)),
                          ((0, 0, 0), (1, 1, 1)), ((5, 7, 3), (3, 1, 5))], ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "w_along"), [("bfloat16", "k"), ("float16", "n"), ("int8", "k")])
def test_matrices_may_lie_anywhere(kernel, dtype, w_along, gaps, offsets):
    words = {"out_dtype": "float16", "scales": "each"} if dtype == "int8" else {}
    words |= {"gaps": gaps, "offsets": offsets, "residual": True}
    for shape in ((700, 1000, 208), (10, 2000, 1000)):
        cuda_gemm.check(GemmCase(*shape, dtype, w_along=w_along, **words), kernel)


def test_the_longest_sums_of_integers(kernel):
    """-128 * -128, as often as an int32 holds."""
    case = GemmCase(200, 300, 131071, "int8")
    gemm = cuda_gemm.CudaGemm(case, kernel)
    for name in ("x", "w"):
        gemm.placed[name].tensor.fill_(0x80)
    assert (np.asarray(gemm.run()["out"]) == 2**14 * 131071).all()


@pytest.mark.parametrize("shape", [(1500, 2000, 1000), (600, 4096, 2048), (13, 4096, 4096), (300, 9000, 2048)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_thousand_runs_under_load(kernel, dtype, shape):
    """Another stream keeps the GPU's memory busy, so that copies and blocks come in other orders."""
    import torch

    case = GemmCase(*shape, dtype, bias="" if dtype == "int8" else "float32")
    gemm = cuda_gemm.CudaGemm(case, kernel)
    case.check(gemm.run())
    out = gemm.placed["out"].tensor
    first, busy, noise = out.clone(), torch.cuda.Stream(), torch.zeros(1 << 27, dtype=torch.uint8, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(busy):
                noise.add_(1)
        out.fill_(0xA5)
        gemm.call(
            gemm.workspace.data_ptr() if gemm.call.workspace_bytes else 0, torch.cuda.current_stream().cuda_stream, 0
        )
        wrong += (out != first).any()
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_in_a_graph(kernel):
    """Captured launches of a stream share counters; copies are a launch's own. The last problem's last wave is cut."""
    import torch

    for case in (GemmCase(13, 4096, 4096), GemmCase(300, 1001, 999, w_along="n"), GemmCase(1300, 3584, 4000)):
        gemm = cuda_gemm.CudaGemm(replace(case, bias="float32"), kernel)
        gemm.case.check(gemm.run())
        first = gemm.placed["out"].tensor.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                gemm.call(
                    gemm.workspace.data_ptr() if gemm.call.workspace_bytes else 0,
                    torch.cuda.current_stream().cuda_stream,
                    0,
                )
        for _ in range(5):
            gemm.placed["out"].tensor.fill_(0xA5)
            graph.replay()
            torch.cuda.synchronize()
            fetched = gemm.placed["out"].tensor.clone()
            own = fetched != 0xA5
            assert torch.equal(fetched[own], first[own]) and own.any()
