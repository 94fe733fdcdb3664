"""The gradient of sinks: the oracle against autodiff in float64, the CPU engine and CUDA against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from qflash import reference
from qflash.call.prepare import prepare
from qflash.dispatch import kernels_of
from qflash.testing import runner
from qflash.testing.case import Case
from qflash.testing.compare import check_same_bits
from qflash.testing.sink_gradients import CASES, check_sink_gradient, planned


def by_name(case: Case) -> str:
    return case.name


def run(case: Case, num_threads: int = 0) -> tuple[np.ndarray, ...]:
    """(dq, dk, dv, dsinks) of the CPU engine, in poisoned buffers."""
    plan, arrays = planned(case, "cpu_bwd")
    results = tuple(np.full(result.shape, np.nan, result.dtype) for result in plan.results)
    runner.launch(prepare(plan), arrays, results, num_threads)
    return results


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_cpu(case):
    first = run(case)
    check_sink_gradient(case, first[-1])
    for num_threads in (1, 3):
        check_same_bits(case, first, run(case, num_threads), names=("dq", "dk", "dv", "dsinks"))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [row.name for row in kernels_of("attention_backward", "cuda") if row.sinks])
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_cuda(case, kernel):
    case = runner.suited(case, kernel, runner.arch_of("cuda"))
    plan, arrays = planned(case, kernel, runner._current_gpu())
    call = runner.CudaCall(plan, arrays)
    first, again = tuple(call.run()), tuple(call.run())
    check_sink_gradient(case, first[-1])
    check_same_bits(case, first, again, names=("dq", "dk", "dv", "dsinks"))


@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_agrees_with_torch_in_float64(causal):
    """A sink written down as what it is: a column of scores that no value belongs to."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, length, heads, 8)) for length, heads in ((9, 4), (6, 2), (6, 2)))
    dout, dlse, sinks = rng.standard_normal(q.shape), rng.standard_normal((2, 4, 9)), rng.standard_normal(4)
    wide = [torch.from_numpy(x).transpose(1, 2) for x in (q, k.repeat(2, 2), v.repeat(2, 2))]
    logits = torch.from_numpy(sinks).requires_grad_()
    s = wide[0] @ wide[1].transpose(-1, -2) * 8**-0.5
    if causal:
        seen = torch.ones(9, 6, dtype=torch.bool).tril(6 - 9)  # the first three rows see nothing
        s = s.masked_fill(~seen, -torch.inf)
    s = torch.cat([s, logits[:, None, None].expand(2, 4, 9, 1)], -1)
    out, lse = torch.softmax(s, -1)[..., :-1] @ wide[2], torch.logsumexp(s, -1)
    tops = torch.from_numpy(dout).transpose(1, 2), torch.from_numpy(dlse)
    (want,) = torch.autograd.grad((out, lse), logits, tops)
    got = reference.sink_gradient(q, k, v, dout, dlse, causal=causal, sinks=sinks)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_through_out_alone_and_through_lse_alone():
    case = next(case for case in CASES if case.name == "sinks_causal_gqa")
    inputs, (dout, dlse) = case.make_inputs(), case.make_gradients()
    words = {"causal": True, "sinks": inputs.sinks}
    both = reference.sink_gradient(inputs.q, inputs.k, inputs.v, dout, dlse, **words)
    parts = [
        reference.sink_gradient(inputs.q, inputs.k, inputs.v, dout, None, **words),
        reference.sink_gradient(inputs.q, inputs.k, inputs.v, 0 * dout, dlse, **words),
    ]
    assert all(part.any() for part in parts)
    np.testing.assert_allclose(sum(parts), both, rtol=1e-10)


def test_nan_in_what_a_row_that_sees_nothing_gets_does_not_reach_it():
    case = Case("unseen", 9, 6, 2, 2, 16, causal=True, sinks=("0.5",))
    plan, arrays = planned(case, "cpu_bwd")
    arrays["dout"] = arrays["dout"].copy()
    arrays["dout"][:, :3] = np.nan
    results = [np.full(result.shape, np.nan, result.dtype) for result in plan.results]
    runner.launch(prepare(plan), arrays, results)
    assert np.isfinite(results[-1]).all()
    arrays["dout"][:, 4] = np.nan
    runner.launch(prepare(plan), arrays, results)
    assert np.isnan(results[-1]).all()
