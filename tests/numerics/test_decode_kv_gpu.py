"""The decode kernels on what `quantize_kv` leaves, on a GPU: against their replay, `sm90_int8` and exact attention."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash.testing import Case, check
from qflash.testing.case import Rotary
from qflash.testing.compare import check_replay, errors
from qflash.testing.oracle import expected, replayed
from qflash.testing.runner import run_case

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
FRAMEWORK = "torch-cuda"


@pytest.fixture(params=["sm90_decode_kv", "decode_kv"])
def kernel(request, cuda_torch) -> str:
    capability = torch.cuda.get_device_capability()
    if request.param.startswith("sm90") and capability != (9, 0):
        pytest.skip("sm90_decode runs on compute capability 9.0 alone")
    if capability < (8, 0):
        pytest.skip("bfloat16 needs the tensor cores of compute capability 8.0")
    return request.param


@pytest.fixture
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("quantize_kv runs on compute capability 9.0 alone")


@pytest.mark.parametrize("q_len", range(1, 9))
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128, 192, 256])
def test_groups_and_head_dims(kernel, q_len, group, head_dim):
    lens = (900, 65, 300)
    case = Case(
        "gpu", q_len, 900, 2 * group, 2, head_dim, batch=3, dtype="float16", causal=True, kv_lens=lens, seed=q_len
    )
    check(case, kernel, FRAMEWORK)


WORDS = (
    {"window": (200, 0)}, {"softcap": 20.0}, {"rope": Rotary(128)}, {"rope": Rotary(64, interleaved=True)},
    {"data": "biased_k"}, {"sinks": ("0.5", "-1.25", "3")},
    # A few keys make up a row. Weights of theirs that bfloat16 rounds relative to another maximum than the replay's
    # differ from it by 2.3e-3, beyond the bound of 2e-3; float16 has 8 times the digits.
    {"data": "rising", "scale": 0.5, "dtype": "float16"},
    {"plant": (("k", (0, 1400, 0, 3), "nan"), ("v", (1, 1499, 1, 3), "inf"))},
)  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_words(kernel, words):
    words = {"dtype": "bfloat16"} | words
    check(Case("gpu", 4, 1500, 8, 2, 128, batch=2, causal=True, seed=3, **words), kernel, FRAMEWORK)


def test_rows_of_few_keys_in_bfloat16(kernel):
    """The bound that docs/numerics.md states for them."""
    case = Case("gpu", 4, 1500, 8, 2, 128, batch=2, dtype="bfloat16", causal=True, seed=3, data="rising", scale=0.5)
    out, _ = run_case(case, kernel, FRAMEWORK)
    assert errors(out, replayed(case, kernel)[0]).relative_l2 <= 2.0**-8


@pytest.mark.parametrize(("q_heads", "keys"), [(4, 4096), (4, 65536), (64, 16384)])
def test_sums_of_many_keys(kernel, q_heads, keys):
    """Up to 16 rows eight warps share the keys, from 33 on two; the batch leaves few blocks to share them further."""
    case = Case("many", 1, keys, q_heads, 1, 128, batch=4, dtype="float16", seed=1)
    found = run_case(case, kernel, FRAMEWORK)
    check_replay(case, *found, replayed(case, kernel), weights_dtype=case.dtype)
    assert errors(found[0], expected(case).out).relative_l2 <= 0.0125


def test_repeats_have_the_same_bits(kernel):
    case = Case("repeats", 2, 9000, 16, 2, 128, batch=5, dtype="bfloat16", causal=True, seed=2)
    first = run_case(case, kernel, FRAMEWORK)
    for _ in range(20):
        for got, want in zip(run_case(case, kernel, FRAMEWORK), first, strict=True):
            np.testing.assert_array_equal(got, want)


def test_what_the_gpu_quantized(hopper):
    """From end to end: `attention` decodes by default, and is as near to `sm90_int8` as weights of 16 bits allow."""
    torch.manual_seed(1)
    q = torch.randn(3, 1, 32, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 3, 5000, 8, 128, dtype=torch.bfloat16, device="cuda")
    lens = torch.tensor([5000, 17, 4095], dtype=torch.int32, device="cuda")
    kv = qflash.quantize_kv(k, v, lens=lens)
    assert qflash.explain(q, kv).kernel == "sm90_decode"
    out = qflash.attention(q, kv)
    other = qflash.attention(q, kv, kernel="sm90_int8")
    assert errors(out.float().cpu().numpy(), other.float().cpu().numpy()).relative_l2 <= 4e-3


def test_a_graph_serves_other_lengths(hopper):
    """Lengths stay on the device: a captured call reads them when it is replayed."""
    torch.manual_seed(2)
    q = torch.randn(4, 2, 16, 64, dtype=torch.float16, device="cuda")
    k, v = torch.randn(2, 4, 3000, 4, 64, dtype=torch.float16, device="cuda")
    lens = torch.full((4,), 3000, dtype=torch.int32, device="cuda")
    kv = qflash.quantize_kv(k, v)
    qflash.attention(q, kv, kv_lens=lens, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qflash.attention(q, kv, kv_lens=lens, causal=True)
    for values in ((3000, 1, 64, 2999), (0, 65, 128, 1000), (3000, 3000, 3000, 3000)):
        lens.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, qflash.attention(q, kv, kv_lens=lens, causal=True))
