"""batch_invariant=True, emulated: a sequence alone has the bits that it has beside others, on any number of blocks."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import dispatch
from qflash.testing import Case, kept, paged
from qflash.testing.compare import check_contract
from qflash.testing.oracle import integers_of

DECODE = ("sm90_decode", "decode")
# Lengths that have one split, several, as many as there can be and none; and a last split that is not full.
LENS = (300, 900, 0, 1025, 17)
PROCESSORS = (1, 7, 24)


def same_bits(ours, theirs) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


class Batch:
    """Sequences of several lengths on one kernel: all together, and each alone, as arrays or on pages."""

    def __init__(self, gpu, variant, lens=LENS, q_len=2, heads=(8, 2), head_dim=64, dtype="bfloat16", **words):
        self.gpu, self.variant, self.lens = gpu, dispatch.VARIANTS[variant], lens
        self.case = Case(
            "batch", q_len, max(lens), *heads, head_dim, dtype=dtype, batch=len(lens), kv_lens=lens, seed=2,
            **{name: words.pop(name) for name in ("causal", "window", "softcap") if name in words},
        )  # fmt: skip
        self.inputs = self.case.make_inputs()
        self.words = {**self.case.options(), "return_lse": True, "kernel": self.variant.kernel.name, **words}
        if self.variant.precision != "native":
            self.words["precision"] = self.variant.precision
        self.kv = paged.on_pages(self.case, self.inputs, variant, 32).kv if paged.is_paged(variant) else None
        self.kept = kept.on_kept(self.case, self.inputs).kv if kept.is_kept(variant) else None

    def run(self, which=slice(None), processors=3, lengths=True, **words):
        """(out, lse) of some sequences. lengths: False cuts arrays to the length of the one, which is not told."""
        self.gpu.multiprocessors = processors
        words = {"batch_invariant": True, **self.words, **words}
        q, k, v = (x[which] for x in (self.inputs.q, self.inputs.k, self.inputs.v))
        if self.kv is not None:
            parts = (self.kv.k_scale, self.kv.v_scale, self.kv.k_mean, self.kv.layout)
            table, lens = self.kv.page_table[which], self.kv.lens[which]
            if not lengths:  # and the table has no more columns than it needs
                table = table[:, : -(-int(lens[0]) // self.kv.page_size)]
            kv = qflash.PagedKV(self.kv.k_pages, self.kv.v_pages, table, lens, *parts)
            return qflash.attention(q, kv, **words)
        if self.kept is not None:
            return qflash.attention(q, self.quantized(which, lengths), **words)
        if lengths:
            return qflash.attention(q, k, v, kv_lens=np.array(self.lens, np.int32)[which], **words)
        length = self.lens[which.start]
        return qflash.attention(q, k[:, :length], v[:, :length], **words)

    def quantized(self, which, lengths):
        """The QuantizedKV of some sequences, as `run` wants them."""
        length = None if lengths else self.lens[which.start]
        cuts = {"k": length, "v": length, "k_scale": length and -(-length // 64)}
        parts = {name: getattr(self.kept, name)[which] for name in ("k", "k_scale", "k_mean", "k_nonfinite", "v")}
        for name, end in cuts.items():
            parts[name] = np.ascontiguousarray(parts[name][..., :end] if name == "k_scale" else parts[name][:, :end])
        return dataclasses.replace(self.kept, **parts, lens=self.kept.lens[which] if lengths else None)

    def check(self, together=PROCESSORS, alone=(5,)):
        first = self.run(processors=together[0])
        for processors in together[1:]:
            assert same_bits(first, self.run(processors=processors)), processors
        for b, length in enumerate(self.lens):
            for processors in alone:
                found = self.run(slice(b, b + 1), processors, lengths=not length)
                assert same_bits([x[0] for x in found], [x[b] for x in first]), (length, processors)
        return first


@pytest.mark.parametrize(
    "variant",
    [*DECODE, "sm90_decode_pages", "decode_pages", "sm90_decode_pages_int8", "sm90_decode_kv", "decode_kv"],
)
@pytest.mark.parametrize("words", [{"causal": True}, {"window": (600, 0)}, {"softcap": 20.0}], ids=str)
def test_alone_and_beside_others(gpu, variant, words):
    batch = Batch(gpu, variant, **words)
    found = batch.check()
    assert gpu.launched[-1] == batch.variant.kernel.name
    if batch.variant.kv != "pages_int8":
        check_contract(batch.case, *found, batch.variant.contract, integers=integers_of(variant))


@pytest.mark.parametrize("kernel", DECODE)
def test_by_default_bits_depend_on_the_batch(gpu, kernel):
    """What the word is for: were it not so, the tests here would say nothing."""
    batch = Batch(gpu, kernel)
    assert not same_bits(*(batch.run(processors=n, batch_invariant=False) for n in (1, 24)))


@pytest.mark.parametrize(("heads", "q_len"), [((1, 1), 1), ((24, 1), 1), ((48, 1), 1), ((20, 10), 1), ((11, 11), 2)])
@pytest.mark.parametrize("kernel", DECODE)
def test_heads_and_rows(gpu, kernel, heads, q_len):
    """Rows of one, two and four warps; heads that are read side by side, and chunks of them."""
    batch = Batch(gpu, kernel, (900, 257, 64), q_len, heads, causal=True)
    check_contract(batch.case, *batch.check((1, 12, 24)))


@pytest.mark.parametrize("kernel", DECODE)
def test_as_many_splits_as_there_can_be(gpu, kernel):
    """From then on a longer sequence has larger ones."""
    batch = Batch(gpu, kernel, (8 * 1024 + 700, 300), 1, (8, 8))
    check_contract(batch.case, *batch.check((8, 40), (24,)))


@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        *((kernel, 256) for kernel in DECODE),
        *(pytest.param(kernel, 256, marks=pytest.mark.slow) for kernel in ("sm90_decode_kv", "decode_pages_int8")),
        *(pytest.param(kernel, 128, marks=pytest.mark.slow) for kernel in (*DECODE, "decode_kv")),
    ],
)
def test_head_dims(gpu, kernel, head_dim):
    sinks = np.linspace(-1, 2, 8, dtype=np.float32)
    Batch(gpu, kernel, (1000, 600), 1, head_dim=head_dim, sinks=sinks).check((1, 5), (3,))


@pytest.mark.parametrize("kernel", DECODE)
def test_a_page_that_is_lost(gpu, kernel):
    """Its sequence is NaN, whichever split it is in, and no other."""
    batch = Batch(gpu, f"{kernel}_pages", (1500, 800, 1500), 1)
    batch.kv.page_table[2, 40] = -1
    out, _ = batch.check((1, 7), (4,))
    assert np.isnan(out[2].astype(np.float32)).all() and np.isfinite(out[:2].astype(np.float32)).all()


# Dispatch says that these serve it as they are: their blocks go through all keys of their rows.
OTHERS = [
    name
    for name, variant in dispatch.VARIANTS.items()
    if variant.kernel.backend == "cuda" and variant.kernel.batch_invariant and not variant.kernel.few_rows
    and variant.kv not in ("quantized", "kept") and variant.precision != "int8_fp8"
]  # fmt: skip


@pytest.mark.parametrize("variant", OTHERS)
def test_kernels_without_splits(gpu, variant):
    Batch(gpu, variant, (150, 70, 0), 70, (2, 1), dtype="float16", causal=True).check((1, 5), (3,))


def test_rungs_refuse(gpu):
    x = np.zeros((1, 16, 1, 64), ml_dtypes.bfloat16)
    with pytest.raises(qflash.NoKernelError, match="does not promise the same bits in every batch"):
        qflash.attention(x, x, x, kernel="fa_tc", batch_invariant=True)
