"""The rungs of the ladder that run only by name: what each refuses so that it teaches one thing, and how it says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qflash import NoKernelError, dispatch
from qflash.call.spec import Spec
from qflash.testing import BY_NAME, Case, judge
from qflash.testing.compare import expected
from qflash.testing.runner import refusals, suited

RUNGS = ("unfused", "fa_warps", "fa_tc")
PLAIN = Spec("cuda", 90, "float16", 64)
EVERY_OTHER_WORD = replace(PLAIN, window=True, softcap=True, kv_lens=True)
NO_ROPE = "takes no rope; fa and fa_mma do"
NO_SINKS = "takes no sinks"
NO_PACKING = "takes no packed arrays (attention_varlen); fa and fa_mma do"


@pytest.mark.parametrize("name", RUNGS)
def test_they_refuse_rope_packed_arrays_and_sinks_and_nothing_else_of_a_call(name: str) -> None:
    row = dispatch.BY_NAME[name]
    assert dispatch.reasons(row, EVERY_OTHER_WORD) == []
    for rope in ("half", "interleaved"):
        assert dispatch.reasons(row, replace(PLAIN, rope=rope)) == [NO_ROPE]
    assert dispatch.reasons(row, replace(PLAIN, packed=True)) == [NO_PACKING]
    assert dispatch.reasons(row, replace(PLAIN, sinks=True)) == [NO_SINKS]
    with pytest.raises(NoKernelError, match=rf"kernel '{name}' cannot serve this problem: takes no sinks\n"):
        dispatch.choose(replace(PLAIN, sinks=True), name)
    with pytest.raises(NoKernelError, match="takes no rope; fa and fa_mma do; takes no packed arrays"):
        dispatch.choose(replace(PLAIN, rope="half", packed=True), name)


@pytest.mark.parametrize("name", ["fa", "fa_mma"])
def test_the_kernels_that_their_reasons_name_do_serve(name: str) -> None:
    assert (
        dispatch.reasons(dispatch.BY_NAME[name], replace(EVERY_OTHER_WORD, rope="half", packed=True, sinks=True)) == []
    )


@pytest.mark.parametrize("head_dim", [1, 20, 100, 255])
def test_wmma_refuses_rows_of_no_whole_chunks(head_dim: int) -> None:
    spec = replace(PLAIN, head_dim=head_dim)
    why = f"head_dim is {head_dim}; fa_tc takes multiples of 8, rows of whole 16 bytes"
    assert dispatch.reasons(dispatch.BY_NAME["fa_tc"], spec) == [why]
    assert not any(dispatch.reasons(dispatch.BY_NAME[name], spec) for name in ("unfused", "fa_warps"))


def test_a_case_is_made_to_suit_them_but_keeps_what_they_refuse() -> None:
    rope = suited(BY_NAME["rope_pair"], "fa_tc", 90)
    assert (rope.head_dim, rope.dtype in ("float16", "bfloat16")) == (8, True)
    assert refusals(rope, "fa_tc", 90) == [NO_ROPE]
    assert refusals(BY_NAME["packed"], "fa_warps", 90) == [NO_PACKING]
    assert refusals(BY_NAME["packed_rope"], "unfused", 90) == [NO_ROPE, NO_PACKING]
    assert refusals(BY_NAME["packed_rope"], "fa", 90) == []


NONFINITE_V = Case("v", 40, 40, 4, 2, 16, causal=True, dtype="float16", plant=(("v", (0, 30, 1, 3), "nan"),))


def test_the_contract_knows_where_nonfinite_values_may_spread() -> None:
    """In the channels of v that hold some, for a kernel whose row says so; everywhere else the positions must match."""
    want = expected(NONFINITE_V)
    out, lse = want.out.astype("float16"), want.lse.astype("float32")
    spread = out.copy()
    spread[0, :30, 2:, 3] = float("nan")
    assert judge(NONFINITE_V, spread, lse, hides_masked_nonfinite_v=False).ok
    assert not judge(NONFINITE_V, spread, lse).ok
    for at, value in (((0, 5, 0, 3), "nan"), ((0, 5, 2, 4), "inf"), ((0, 35, 2, 3), "0")):
        wrong = spread.copy()
        wrong[at] = float(value)  # of another head, in another channel, a number where a key that is seen is NaN
        assert not judge(NONFINITE_V, wrong, lse, hides_masked_nonfinite_v=False).ok


def test_padding_spreads_nothing() -> None:
    padded = replace(NONFINITE_V, causal=False, kv_lens=(30,))
    want = expected(padded)
    out, lse = want.out.astype("float16"), want.lse.astype("float32")
    out[0, 0, 2, 3] = float("nan")
    assert not judge(padded, out, lse, hides_masked_nonfinite_v=False).ok


def test_only_wmma_lets_them_spread_and_explain_says_so() -> None:
    assert [row.name for row in dispatch.KERNELS if not row.hides_masked_nonfinite_v] == ["fa_tc"]
    note = "NaN or infinity in v may reach rows that fa_tc masks it from (docs/numerics.md)"
    assert dispatch.notes(EVERY_OTHER_WORD, "fa_tc", 64) == [note]
    assert dispatch.notes(PLAIN, "fa_tc", 64) == dispatch.notes(EVERY_OTHER_WORD, "fa_mma", 64) == []
