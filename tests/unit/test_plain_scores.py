"""Which scores are plain, and so which library of a kernel serves a call."""

from __future__ import annotations

import pytest

from qflash import dispatch
from qflash.backends import cuda
from qflash.call.array import Array
from qflash.ops.problem import Options, check

X = Array((1, 16, 2, 64), None, "float16", "cuda:0")


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        ({}, True),
        ({"scale": 3.0}, True),
        ({"scale": 1e-44}, True),  # a denormal of float32
        ({"softcap": 0.0}, True),
        ({"scale": 1e-60}, False),  # 0 in float32, which is what kernels see
        ({"scale": 0.0}, False),
        ({"scale": -1.0}, False),
        ({"softcap": 30.0}, False),
    ],
)
def test_plain_scores_are_a_positive_factor(words, plain):
    spec = check(X, X, X, Options(**words)).spec(90)
    assert spec.plain_scores is plain
    for name, row in dispatch.BY_NAME.items():
        if row.backend == "cuda" and row.per_scores:
            unit = cuda.unit(row, spec)
            assert dict(unit.defines)["QF_PLAIN_SCORES"] == str(int(plain)), name
            assert ("softcap" in unit.label) is not plain


def test_every_kernel_of_hopper_that_multiplies_has_both_libraries():
    for row in (row for row in dispatch.kernels_of("attention") if row.backend == "cuda"):
        found = {dict(unit.defines).get("QF_PLAIN_SCORES") for unit in cuda.specialisations([90], [row.name])}
        assert found == ({"0", "1"} if row.per_scores else {None}), row.name
