"""Provoked faults in what `sm90_decode` has of its own for INT8 pages: scales in the ring, integers, masks, sums.

Each must show within a few seeds, as tests/emulated/test_faults_decode.py says.
"""

from __future__ import annotations

import pytest

from qflash.testing import Case
from qflash.testing.faults import Fault

KERNEL, DTYPE, HEAD_DIM = "sm90_decode_pages_int8", "float16", 64
SEEDS = range(8)
PAGES, SUMS, PRODUCT, QUERIES = (
    "attn/decode/tma_pages.cuh", "attn/decode/int8_sums.cuh", "attn/decode/int8_product.cuh",
    "attn/decode/int8_queries.cuh",
)  # fmt: skip

pytestmark = pytest.mark.slow

CASES = {
    # 4096 values, which the contract's figures are for; the ring goes round in each of three blocks.
    "long": Case("long", 4, 700, 8, 2, HEAD_DIM, batch=2, dtype=DTYPE, seed=1),
    # Keys that only some rows see, in tiles whose other slots have scales of NaN.
    "causal": Case("causal", 4, 200, 8, 1, HEAD_DIM, batch=3, causal=True, dtype=DTYPE, kv_lens=(200, 130, 7)),
    # A k_mean.
    "biased": Case("biased", 4, 200, 8, 1, HEAD_DIM, dtype=DTYPE, data="biased_k"),
}
EITHER = "complaint or contract"

_SCALED = "weight * (e == 0 ? v_scales[j].x : v_scales[j].y);"
_EVEN = "Tensor::multiply(tiles[0], weights, prmt(low, kUpperBytes, 0x4240), prmt(high, kUpperBytes, 0x4240));"
_SCALES = "return x.scale + here.page * x.stride_b + kv_head * x.stride_h + here.token;"

# name: the fault, the case, how it shows, and a part of what is said
FAULTS = {
    "scales: bytes not expected": (
        Fault(PAGES, "bytes += __popc(__ballot_sync(0xffffffffu, has_scales)) * box_rows * 4;"), "long", EITHER, "",
    ),
    "scales: K's not copied": (
        Fault(PAGES, "copy_bytes(ring.k_scales(at.stage) + row, scales_at(p.kv.k_scales, here, part.kv_head), "
              "box_rows * 4, k_full);"),
        "long", "complaint", '"K full',
    ),
    "scales: those of another head": (
        Fault(PAGES, _SCALES, _SCALES.replace("kv_head", "(kv_head ^ 1)")), "long", "contract", "",
    ),
    "masks: none": (
        Fault(SUMS, "mask_scores(p, unit.seen.mask, S, row0 + lane / 4, key0 + first + step + column);"),
        "causal", "contract", "NaN",
    ),
    "masks: V's scale of what a row does not see": (
        Fault(SUMS, f"w[e] = unseen ? 0.0f : {_SCALED}", f"w[e] = {_SCALED}"), "causal", "contract", "NaN",
    ),
    "reference: never raised": (Fault(SUMS, "raise<kPlain>(S, q, v_scales);"), "long", "contract", ""),
    "lse: without q . k_mean": (
        Fault(SUMS, "merged.m += query_dot_k_mean<Config>(s_queries, row) * (p.scale * kLog2e);"),
        "biased", "contract", "lse",
    ),
    "V: signs not flipped": (
        Fault(PRODUCT, _EVEN, _EVEN.replace("low", "low ^ kFlipSigns").replace("high", "high ^ kFlipSigns")),
        "long", "contract", "",
    ),
    "V: channels exchanged": (Fault(PRODUCT, _EVEN, _EVEN.replace("0x4240", "0x4341")), "long", "contract", ""),
    "V: offset stays": (
        Fault(PRODUCT, "Tensor::multiply(offset, weights, kOffsets, kOffsets);"), "long", "contract", "",
    ),
    "q: not multiplied by the Hadamard matrix": (Fault(QUERIES, "hadamard(x);"), "long", "contract", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(faults, name):
    _, case, kind, said = FAULTS[name]
    found = faults.provoke(name, CASES[case], SEEDS)
    assert found.kind in kind.split(" or ") and said in found.text, found


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_nothing_is_reported(faults, case):
    assert faults.provoke("", CASES[case], range(2)).kind == ""
