"""The decode kernels on INT8 pages on a GPU, against their replay. Tensor cores round sums in ways that the emulator
does not show, and the more keys a warp adds up the more of it there is."""

from __future__ import annotations

import numpy as np
import pytest

from qflash.testing import Case, check
from qflash.testing.case import Rotary
from qflash.testing.compare import REPLAY, errors
from qflash.testing.oracle import expected
from qflash.testing.paged import replayed
from qflash.testing.runner import run_case

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
FRAMEWORK = "torch-cuda"


@pytest.fixture(params=["sm90_decode_pages_int8", "decode_pages_int8"])
def kernel(request, cuda_torch) -> str:
    capability = torch.cuda.get_device_capability()
    if request.param.startswith("sm90") and capability != (9, 0):
        pytest.skip("sm90_decode runs on compute capability 9.0 alone")
    if capability < (8, 0):
        pytest.skip("bfloat16 needs the tensor cores of compute capability 8.0")
    return request.param


# Seeds choose the page size and how pools lie in memory (qflash/testing/paged.py).
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_pages_groups_and_head_dims(kernel, seed, group, head_dim):
    q_len = 1 + seed % 8
    lens = (900, 65, 300)
    case = Case(
        "gpu", q_len, 900, 2 * group, 2, head_dim, batch=3, dtype="float16", causal=True, kv_lens=lens, seed=seed
    )
    check(case, kernel, FRAMEWORK)


WORDS = (
    {"window": (200, 0)}, {"softcap": 20.0}, {"rope": Rotary(128)}, {"data": "biased_k"},
    {"data": "rising", "scale": 0.5},
)  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_words(kernel, words):
    check(Case("gpu", 4, 1500, 8, 2, 128, batch=2, dtype="bfloat16", causal=True, seed=3, **words), kernel, FRAMEWORK)


@pytest.mark.parametrize(("q_heads", "keys"), [(4, 4096), (4, 65536), (64, 16384)])
def test_sums_of_many_keys(kernel, q_heads, keys):
    """Up to 16 rows eight warps share the keys, from 33 on two; the batch leaves few blocks to share them further."""
    case = Case("many", 1, keys, q_heads, 1, 128, batch=4, dtype="float16", seed=1)
    out, _ = run_case(case, kernel, FRAMEWORK)
    assert errors(out, replayed(case, kernel)[0]).relative_l2 <= REPLAY
    assert errors(out, expected(case).out).relative_l2 <= 0.015


def test_values_with_a_mean(kernel):
    """V's offset is nine tenths of what is added up where values cancel; here they do not."""
    case = Case("mean", 1, 16384, 8, 1, 128, dtype="float16", data="biased_v", seed=1)
    out, _ = run_case(case, kernel, FRAMEWORK)
    assert errors(out, replayed(case, kernel)[0]).relative_l2 <= REPLAY


def test_repeats_have_the_same_bits(kernel):
    case = Case("repeats", 2, 9000, 16, 2, 128, batch=5, dtype="bfloat16", causal=True, seed=2)
    first = run_case(case, kernel, FRAMEWORK)
    for _ in range(20):
        for got, want in zip(run_case(case, kernel, FRAMEWORK), first, strict=True):
            np.testing.assert_array_equal(got, want)
