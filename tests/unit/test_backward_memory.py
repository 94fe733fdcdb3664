"""How much memory gradients take for dS: the limit, what Python and C make of it, and what `explain` says."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.call.array import Array
from qflash.explanation import Explanation, explanation_of
from qflash.ops import attention
from qflash.ops.attention import ATTENTION
from qflash.ops.backward_memory import DEFAULT_BACKWARD_MEMORY, Scores, ds_within, kept_ds

MIB = 1 << 20


@pytest.fixture
def limit():
    yield qflash.set_backward_memory
    qflash.set_backward_memory(DEFAULT_BACKWARD_MEMORY)


@pytest.mark.parametrize("nbytes", [0, 1, 5 << 30, np.int64(7)])
def test_limit(limit, nbytes):
    limit(nbytes)
    assert qflash.get_backward_memory() == nbytes
    assert type(qflash.get_backward_memory()) is int


@pytest.mark.parametrize(
    ("nbytes", "error", "text"),
    [
        (-1, ValueError, r"nbytes is -1; allowed: an int, 0 to 2\*\*63 - 1"),
        (1 << 63, ValueError, r"nbytes is 9223372036854775808; allowed"),
        (1.5, TypeError, "nbytes is 1.5, a float; allowed"),
        (True, TypeError, "nbytes is True, a bool; allowed"),
        ("1 GB", TypeError, "nbytes is '1 GB', a str; allowed"),
        (None, TypeError, "nbytes is None, a NoneType; allowed"),
        (np.array([3]), TypeError, r"nbytes is array\(\[3\]\), a ndarray; allowed"),
    ],
)
def test_bad_limit(limit, nbytes, error, text):
    with pytest.raises(error, match=text):
        limit(nbytes)
    assert qflash.get_backward_memory() == DEFAULT_BACKWARD_MEMORY


def test_sizes():
    full = Scores(4, 16, 16, 4096, 4096, (-1, -1), False)
    assert kept_ds(full, 1 << 30) == kept_ds(full, (1 << 30) + 5)
    assert kept_ds(full, 1 << 30).nbytes == 1 << 30  # 32 of 64 heads, 32 MiB each
    assert kept_ds(full, 1 << 30).sections == 2
    assert kept_ds(full, 32 * MIB - 1) is None
    causal = Scores(4, 16, 16, 4096, 4096, (-1, 0), False)
    assert kept_ds(causal, 1 << 30).nbytes == 32 * 32 * 65 * 8192  # strips of two query tiles each
    window = Scores(4, 16, 16, 4096, 4096, (1000, 0), False)
    assert kept_ds(window, 1 << 30).nbytes == 64 * 64 * 18 * 8192


def test_no_more_heads_at_a_time_than_keep_a_gpu_busy():
    assert ds_within(Scores(1, 16, 16, 16384, 16384, (-1, -1), False), 1 << 30).sections == 8  # 128 work tiles
    assert ds_within(Scores(1, 16, 16, 16384, 16384, (-1, -1), False), 1 << 29) is None  # 64
    assert ds_within(Scores(1, 16, 16, 16384, 16384, (-1, 0), False), 1 << 30) is None  # 192 unequal ones
    assert ds_within(Scores(4, 16, 16, 4096, 4096, (-1, 0), False), 1 << 30).sections == 2
    assert ds_within(Scores(1, 2, 2, 512, 512, (-1, 0), False), 1 << 30).sections == 1  # there are no more


def explained(head_dim: int = 128, q_len: int = 4096, heads: int = 16, arch: int = 90, **words) -> Explanation:
    x = Array((4, q_len, heads, head_dim), None, "bfloat16", "cuda:0")
    arrays = (x, x, x, *[None] * (len(ATTENTION.arrays) - 3))
    defaults = {"batch_invariant": False, "return_lse": False, "interleaved": False, "causal": False, "max_seqlen_q": 0,
                "max_seqlen_k": 0, "backward_memory": 0}  # fmt: skip
    words = defaults | words
    return explanation_of(ATTENTION.plan(*arrays, *(words.get(name) for name in ATTENTION.words)), arch)


def test_explain_names_the_way_of_dq(limit):
    assert explained().gradients == "gradients: sm90_bwd, dQ from dS kept in 1073741824 bytes, in 2 turns"
    assert explained(head_dim=64).gradients.startswith("gradients: sm90_bwd, dQ from S and dP computed again: at this")
    limit(0)
    assert explained().dq == "dQ from S and dP computed again: 0 bytes (set_backward_memory) hold too few heads of dS"
    assert explained(arch=80).backward == "fa_mma_bwd"


@pytest.mark.parametrize(
    ("head_dim", "arch", "kept"), [(256, 75, False), (200, 75, False), (192, 75, True), (256, 80, True)]
)
def test_explain_on_other_architectures(head_dim, arch, kept):
    x = Array((4, 4096, 16, head_dim), None, "float16", "cuda:0")
    words = (False, None, None, None, None, None, False, False, False, 0, 0, 0)
    plan = ATTENTION.plan(x, x, x, *[None] * (len(ATTENTION.arrays) - 3), *words)
    told = explanation_of(plan, arch)
    assert told.backward == "fa_mma_bwd"
    assert told.dq.startswith("dQ from dS kept") == kept
    assert kept or told.dq.endswith("shared memory holds 32 keys at this head_dim")


def test_kernels_that_keep_dS_say_so():
    named = {row.name for row in dispatch.kernels_of("attention_backward") if row.drops_ds is not None}
    assert named == {"sm90_bwd", "fa_mma_bwd"}


def test_the_limit_is_a_word_of_the_call(limit):
    """So plans, and programs that were traced, are not shared between limits."""
    x = Array((1, 640, 2, 128), None, "bfloat16", "cuda:0")
    fields = []
    for memory in (0, 1 << 30):
        limit(memory)
        words = (False, None, None, None, None, None, False, True, False, 0, 0, qflash.get_backward_memory())
        lse = Array((1, 2, 640), None, "float32", "cuda:0")
        extras = [None] * (len(ATTENTION.arrays) - 3)
        plan = attention.ATTENTION_BACKWARD.plan(x, None, x, x, x, *extras, x, lse, *words)
        fields.append(dict(plan.fields)["ds_bytes"])
    assert fields == [0, 2 * 100 * 8192]
