"""NumPy's scalars are as good as Python's in every word of a call: qflash.typing says so of Flag, Integer, Number."""

import numpy as np
import pytest

import qflash

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 32)).astype(np.float32)
Q = RNG.standard_normal((1, 16, 2, 8)).astype(np.float32)
TARGETS = np.zeros(4, np.int32)
A = RNG.integers(-128, 128, (4, 4), np.int8)

CALLS = {
    "softmax": (lambda **words: qflash.softmax(X, **words), {"scale": np.float32(0.5)}),
    "layer_norm": (lambda **words: qflash.layer_norm(X, **words), {"eps": np.float32(0.5), "return_stats": np.True_}),
    "cross_entropy": (
        lambda **words: qflash.cross_entropy(X, TARGETS, **words),
        {"ignore_index": np.int64(3), "label_smoothing": np.float32(0.5), "return_lse": np.True_},
    ),
    "quantize": (
        lambda **words: qflash.quantize(Q, granularity="group", rounding="stochastic", **words),
        {"group": np.int32(4), "smooth": np.True_, "symmetric": np.True_, "seed": np.uint8(7)},
    ),
    "quantize with a zero point": (lambda **words: qflash.quantize(Q, **words), {"symmetric": np.False_}),
    "int8_matmul": (
        lambda **words: qflash.int8_matmul(A, A, **words),
        {"a_scale": np.float32(2), "b_scale": np.int8(3)},
    ),
    "attention": (
        lambda **words: qflash.attention(Q, Q, Q, **words),
        {
            "causal": np.True_,
            "window": (np.int64(3), np.int8(-1)),
            "softcap": np.float32(2),
            "scale": np.float64(0.5),
            "return_lse": np.True_,
        },
    ),
}


def python(word):
    return tuple(map(python, word)) if isinstance(word, tuple) else word.item()


def parts(result) -> list:
    if isinstance(result, qflash.Quantized):
        return [getattr(result, name) for name in result.__slots__]
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", CALLS)
def test_numpy_scalars_do_what_python_scalars_do(name):
    call, words = CALLS[name]
    got = parts(call(**words))
    want = parts(call(**{word: python(value) for word, value in words.items()}))
    assert [type(part) for part in got] == [type(part) for part in want]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_quantized_array_from_numpy_scalars_goes_on():
    x = qflash.quantize(Q, symmetric=np.False_)
    assert x.symmetric is False
    np.testing.assert_array_equal(
        qflash.attention(x, x, Q), qflash.attention(*[qflash.quantize(Q, symmetric=False)] * 2, Q)
    )
