"""explain on what quantize returns: the kernels of attention on integers, in every framework."""

import dataclasses

import numpy as np
import pytest

import qflash
from qflash import dispatch

RNG = np.random.default_rng(3)
X = RNG.standard_normal((1, 20, 2, 8), dtype=np.float32)
WRAP = {
    "numpy": lambda x: x,
    "torch": lambda x: pytest.importorskip("torch").from_numpy(x),
    "jax": lambda x: pytest.importorskip("jax.numpy").asarray(x),
}


def quantized(framework="numpy"):
    x = WRAP[framework](X)
    return qflash.quantize(x, granularity="token"), qflash.quantize(x, granularity="group", smooth=True), x


@pytest.mark.parametrize("framework", WRAP)
def test_tells_the_kernel(framework):
    said = qflash.explain(*quantized(framework), causal=True)
    assert said.kernel == "cpu_int8" and (said.spec.op, said.spec.kv) == ("attention", "quantized")
    verdicts = {name: verdict for name, verdict, _ in said.rows}
    assert list(verdicts) == [row.name for row in dispatch.kernels_of("attention")]
    assert {name for name, verdict in verdicts.items() if verdict != "no"} == {"cpu_int8"}
    assert [name for name, _, _ in said.shown] == ["cpu", "cpu_int8"]  # fa_int8 takes 16 bits


def test_refuses_what_attention_refuses():
    q, k, v = quantized()
    with pytest.raises(ValueError, match=r"k\.granularity is 'token'"):
        qflash.explain(q, q, v)
    with pytest.raises(TypeError, match=r"k is numpy\.ndarray and q qflash.Quantized"):
        qflash.explain(q, X, v)
    with pytest.raises(qflash.NoKernelError, match="kernel 'fa_int8' cannot serve"):
        qflash.explain(q, k, v, kernel="fa_int8")


def test_notes_come_last(monkeypatch):
    """The CPU's kernel pays at once; as if it did not."""
    row = dataclasses.replace(dispatch.BY_NAME["cpu_int8"], pays_from=((("int8", "arrays"), ((256, 4096),)),))
    monkeypatch.setitem(dispatch.BY_NAME, "cpu_int8", row)
    said = qflash.explain(X, X, X, precision="int8")
    assert said.notes == (
        "below 4096 queries and keys cpu is usually faster (quantizing is not paid back); precision=None selects it",
    )
    assert str(said).splitlines()[-1] == f"note: {said.notes[0]}"
    assert qflash.explain(X, X, X).notes == ()
