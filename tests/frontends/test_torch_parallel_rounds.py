"""Calls of a ring that take the keys of several hops: what ranks have, one after the other, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from qflash import Rope  # noqa: E402
from qflash.parallel import rounds  # noqa: E402
from qflash.parallel.parts import Sequences  # noqa: E402
from qflash.parallel.placement import Placement  # noqa: E402
from qflash.parallel.rounds import rounds_of  # noqa: E402
from qflash.parallel.torch import maths  # noqa: E402
from qflash.parallel.torch.ring import attend_blocks, steps_of  # noqa: E402
from qflash.parallel.words import check_words  # noqa: E402
from qflash.testing.case import Case, Rotary  # noqa: E402
from qflash.testing.compare import check_contract  # noqa: E402
from qflash.testing.runner import to_numpy, to_torch  # noqa: E402

LENGTH = 96
BASE = {"q_len": LENGTH, "k_len": LENGTH, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "batch": 2}
PACKED = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "q_lens": (3, 50, 0, 31, 12), "k_lens": (3, 50, 0, 31, 12)}
CASES = (
    Case("causal", **BASE, causal=True),
    Case("full", **BASE, dtype="bfloat16"),
    Case("rope", **BASE, causal=True, rope=Rotary(32)),
    Case("rope_positions", **BASE, causal=True, rope=Rotary(16, True, "per_batch")),
    Case("rope_shared_positions", **BASE, rope=Rotary(32, positions="shared")),
    Case("window", **BASE, causal=True, window=(60, 0)),
    Case("sinks", **BASE, causal=True, sinks=("0.5", "-2", "1", "0")),
    Case("lens", **BASE, kv_lens=(96, 37)),
    Case("packed", **PACKED, causal=True),
)
ALONE = ("lens", "packed")  # hops that are never one call


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many keys each call of a ring takes."""
    attend, found = Sequences.attend, []

    def counted(self, part, *arrays):
        found.append(part.k[1] - part.k[0])
        return attend(self, part, *arrays)

    monkeypatch.setattr(Sequences, "attend", counted)
    return found


def tensor(x):
    return x if x is None else to_torch(x)


def all_ranks(case: Case, placement: str, ranks: int):
    """(out, lse) of the whole sequence, as arrays of NumPy."""
    inputs = case.make_inputs()
    q, k, v, sinks, lens, offsets = map(
        tensor, (inputs.q, inputs.k, inputs.v, inputs.sinks, inputs.kv_lens, inputs.cu_seqlens_q)
    )
    axis = 0 if case.packed else 1
    words = check_words("ring", placement, case.causal, case.window, None, None, None, True, case.head_dim)
    at = Placement.of_whole(placement, ranks, q.shape[axis], "q", 1)
    rope = given = inputs.rope
    if rope is not None:
        rope = Rope(tensor(rope.cos), tensor(rope.sin), rope.interleaved)
        given = inputs.rope if inputs.rope.positions_q is not None else None
    of = Sequences(at, words, maths, q, lens, offsets, max(case.q_lens or (0,)), rope, wide=True)
    indices = [of.tokens(rank).long() for rank in range(ranks)]
    if given is not None:
        positions_k = tensor(given.positions_k)
        of = replace(of, positions_k=torch.stack([positions_k[..., index] for index in indices]))
    blocks = [torch.stack([x.index_select(axis, index) for x in (k, v)]) for index in indices]
    out, lse = torch.empty_like(q), torch.empty(case.make_gradients()[1].shape)
    for rank, index in enumerate(indices):
        own = of
        if given is not None:
            own = replace(of, rope=replace(rope, positions_q=tensor(given.positions_q)[..., index]))
        steps = steps_of(own, rank)
        coming = ([blocks[(rank - hop) % ranks] for hop in one.hops] for one in rounds_of(len(steps), at))
        shares = attend_blocks(q.index_select(axis, index), sinks, own, steps, coming)
        out.index_copy_(axis, index, shares[0])
        lse.index_copy_(-1, index, shares[1])
    return to_numpy(out), to_numpy(lse)


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_within_the_contract(monkeypatch, calls, case, placement, ranks):
    check_contract(case, *all_ranks(case, placement, ranks))
    together = calls.copy()
    calls.clear()
    monkeypatch.setattr(rounds, "MOST_HOPS", 1)
    check_contract(case, *all_ranks(case, placement, ranks))
    assert sum(together) == sum(calls)
    if case.name in ALONE or ranks == 3:
        assert len(together) == len(calls)
    else:  # on four ranks some masks leave no two hops of a round to one call
        assert len(together) + (ranks == 8 or case.name == "full") <= len(calls)


class Operations(TorchDispatchMode):
    """How many operations PyTorch runs: on a GPU most of them are a launch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket not in (torch.ops.aten.select, torch.ops.aten.slice)  # views
        return function(*args, **(kwargs or {}))


def test_offsets_on_a_gpu_are_cut_by_few_launches():
    """Their values are not read, so they are checked on the device; that and the cuts are done once for all parts."""
    at, q = Placement.of_whole("zigzag", 8, 64, "q", 0), torch.zeros(8, 2, 16)
    offsets = torch.tensor([0, 5, 30, 64], dtype=torch.int32)
    words = check_words("ring", "zigzag", True, None, None, None, None, False, 16)
    with Operations() as ran:
        of = Sequences(at, words, maths, q, offsets=offsets, longest=40).cut_once()
        parts = [part for one in steps_of(of, 3) for part in one]
    assert len(parts) >= 15 and ran.count <= 16
    wrong = Sequences(at, words, maths, q, offsets=torch.tensor([0, 30, 5, 64], dtype=torch.int32)).cut_once()
    cuts = {tuple(x.tolist()) for one in steps_of(wrong, 3) for part in one for x in part.offsets}
    assert cuts == {(-1,) * 4}
