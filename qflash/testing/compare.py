"""The numerics contract of docs/numerics.md as code: error figures, and the verdict on a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from qflash.testing.case import Case
from qflash.testing.oracle import (
    PLAIN_INTEGERS,
    Expected,
    Integers,
    expected,
    expected_gradients,
    quantized_strength,
    score_noise,
)

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}

# The contract's figures. Change them only together with docs/numerics.md.
FLOAT32_L2 = 2e-6
FLOAT32_ROW = 4e-6
FLOAT16_ABSOLUTE = 1e-3
HALF_FACTOR = 2.0
LSE = 4e-6
GRADIENT_L2 = {"float32": 1e-5, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}
# A relative L2 error of fewer output values is not meaningful: one of them near zero dominates it.
ENOUGH_VALUES = 256
# values: the minimum number of output values for which the figures before it apply. E4M3 rounds so coarsely that the
# error of a few hundred values, 0.039 on average, varies by a tenth of itself.
INT8 = {"cosine": 0.9995, "l2": 2e-2, "biased_cosine": 0.999, "lse": 8e-3, "values": ENOUGH_VALUES}
INT8_FP8 = {**INT8, "cosine": 0.999, "l2": 4.5e-2, "values": 4096}
# 0.011 on average, in V as well as in the scores; a single row with few significant keys may have twice that.
INT8_PAGES = {**INT8, "l2": 1.5e-2, "values": 4096}
QUANTIZED = {"int8": INT8, "int8_fp8": INT8_FP8, "int8_pages": INT8_PAGES}
REPLAY = 2e-3

# Up to this scale * sum |q_d k_d| a row has the plain bounds; beyond it they grow in proportion (its condition).
PLAIN_STRENGTH = 16.0
# A gradient, and an output next to a sink, may have this absolute error at any size: the spacing of float16 numbers
# near its smallest, and float32 subnormals, which are flushed to zero.
LEAST = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
# If one key has all the weight, dP - delta is 0 in exact arithmetic, and the rounding error of float32 otherwise.
CANCELLED = 2.0**-20


class ContractError(AssertionError):
    """A result violates the contract; the text has the figures and a one-line repro."""


@dataclass(frozen=True)
class Errors:
    """The error of a result against the oracle, over the values that are finite in both."""

    relative_l2: float
    relative_l1: float
    cosine: float
    max_abs: float
    rmse: float


@dataclass
class Verdict:
    """The outcome of a check: the figures, and a sentence for each violated rule."""

    errors: Errors
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures

    def expect(self, what: str, value: float, bound: float, holds: Callable[[float, float], bool] = np.less_equal):
        """Record a failure unless value <= bound (never true for NaN)."""
        if not holds(value, bound):
            self.failures.append(f"{what} is {value:.3g}; allowed: {bound:.3g}")


def errors(got: np.ndarray, want: np.ndarray) -> Errors:
    """Error figures of `got` against `want`, where both are finite. An empty or all-zero `want` must match exactly."""
    got, want = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    both = np.isfinite(got) & np.isfinite(want)
    got, want = got[both], want[both]
    if not got.size:
        return Errors(0.0, 0.0, 1.0, 0.0, 0.0)
    difference = got - want
    size_got, size_want = float(np.linalg.norm(got)), float(np.linalg.norm(want))
    if size_got and size_want:
        cosine = float(np.dot(got / size_got, want / size_want))
    else:
        cosine = 1.0 if size_got == size_want else 0.0
    return Errors(
        relative_l2=_ratio(float(np.linalg.norm(difference)), size_want),
        relative_l1=_ratio(float(np.abs(difference).sum()), float(np.abs(want).sum())),
        cosine=cosine,
        max_abs=float(np.abs(difference).max()),
        rmse=float(np.sqrt(np.mean(difference * difference))),
    )


def _finite_size(x: np.ndarray) -> float:
    return float(np.linalg.norm(x[np.isfinite(x)]))


def _ratio(error: float, size: float) -> float:
    return error / size if size else (0.0 if error == 0 else np.inf)


def judge(
    case: Case,
    out: np.ndarray,
    lse: np.ndarray | None = None,
    precision: str = "native",
    integers: Integers = PLAIN_INTEGERS,
    hides_masked_nonfinite_v: bool = True,
) -> Verdict:
    """Check a result of `case` (NumPy arrays) against the contract. integers: of a quantized kernel.

    hides_masked_nonfinite_v: the kernel's column of dispatch.KERNELS.
    """
    want = expected(case, precision)
    got = np.asarray(out, np.float64)
    if got.shape == want.out.shape and not hides_masked_nonfinite_v:
        # Nonfinite values there count as equal to the oracle's; where the oracle is nonfinite, a number still fails.
        got = np.where(_nonfinite_channels(case) & ~np.isfinite(got), want.out, got)
    verdict = Verdict(errors(got, want.out) if got.shape == want.out.shape else errors(np.empty(0), np.empty(0)))
    if got.shape != want.out.shape:
        verdict.failures.append(f"out has shape {got.shape}; allowed: {want.out.shape}")
        return verdict
    if str(out.dtype) != case.dtype:
        verdict.failures.append(f"out has dtype {out.dtype}; allowed: {case.dtype}")
    _judge_positions(verdict, "out", got, want.out)
    if precision == "native":
        _judge_native(verdict, case, got, want)
    else:
        _judge_quantized(verdict, case, QUANTIZED[precision], integers)
    if lse is not None:
        _judge_lse(verdict, case, lse, want, precision, integers)
    return verdict


def check_contract(
    case: Case,
    out: np.ndarray,
    lse: np.ndarray | None = None,
    precision: str = "native",
    how: str = "",
    integers: Integers = PLAIN_INTEGERS,
    hides_masked_nonfinite_v: bool = True,
) -> Errors:
    """`judge`, raising ContractError for any violated rule. `how`: further arguments of `check` in the repro line."""
    verdict = judge(case, out, lse, precision, integers, hides_masked_nonfinite_v)
    _raise_if_broken(case, verdict.failures, how)
    return verdict.errors


def check_replay(
    case: Case,
    out: np.ndarray,
    lse: np.ndarray,
    replay: tuple[np.ndarray, np.ndarray],
    how: str = "",
    weights_dtype: str = "float32",
) -> None:
    """Check a quantized kernel against its replay, so that quantization noise cannot hide a bug.

    weights_dtype: what weights are rounded to before they are multiplied by V; E4M3 in precision "int8_fp8".
    """
    precision = "int8_fp8" if weights_dtype == "float8_e4m3fn" else "int8"
    want = replay[0].astype(case.dtype).astype(np.float64)
    verdict = Verdict(errors(out, want))
    _judge_positions(verdict, "out", np.asarray(out, np.float64), want)
    _judge_positions(verdict, "lse", np.asarray(lse, np.float64), replay[1])
    if want.size >= ENOUGH_VALUES and precision == "int8":
        verdict.expect("relative L2 error against the replay", verdict.errors.relative_l2, REPLAY)
    if want.size >= ENOUGH_VALUES and precision == "int8_fp8":
        error = _without_ties(np.asarray(out, np.float64), want)
        verdict.expect("relative L2 error against the replay, of 99 rows in 100", error, REPLAY)
    # Near a tie the two may round a number in different directions, a difference of 2 u. First a weight: in a row with
    # few significant keys that changes all of out. Then out.
    units = UNIT_ROUNDOFF[weights_dtype] + UNIT_ROUNDOFF[case.dtype]
    bound = np.full(replay[1].shape, REPLAY + 2 * units)
    _judge_rows(verdict, case, np.asarray(out, np.float64), want, expected(case, precision).weight, bound)
    magnitude = np.abs(np.where(np.isfinite(replay[1]), replay[1], 0.0))
    excess = np.abs(_difference(np.asarray(lse, np.float64), replay[1])) - REPLAY * (1 + magnitude)
    verdict.expect("excess of lse over its distance to the replay", excess.max(initial=0.0), 0.0)
    _raise_if_broken(case, verdict.failures, how)


def _without_ties(out: np.ndarray, want: np.ndarray) -> float:
    """The relative L2 error of all rows but the hundredth that differs most.

    A weight that E4M3 rounds in another direction changes its row by a hundredth or more, and about one in a thousand
    weights is that close to a tie. _judge_rows bounds the difference of such a row.
    """
    error = np.linalg.norm(_difference(out, want), axis=-1).ravel()
    size = np.linalg.norm(np.where(np.isfinite(want), want, 0.0), axis=-1).ravel()
    kept = np.argsort(error)[: error.size - -(-error.size // 100)]
    return float(np.linalg.norm(error[kept]) / max(np.linalg.norm(size[kept]), np.finfo(np.float64).tiny))


def check_gradients(case: Case, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, how: str = "") -> dict[str, Errors]:
    """Check gradients against the oracle, by relative L2 error. `how`: further arguments of the repro line."""
    failures: list[str] = []
    found = {}
    condition = float(_condition(expected(case)).max(initial=1.0))
    wants = expected_gradients(case)
    # Gradients grow with weights and a softcap's slopes, both exponentials of scores. If rounding changes these by more
    # than 1, the size of a small gradient is not known.
    sizes_known = float(_rounded_rotation(case, expected(case).strength).max(initial=0.0)) <= 1
    # Gradients are summed over rows and cancel: each is measured against the largest of the three.
    scale = max(_finite_size(x) for x in wants)
    for name, got, want in zip(("dq", "dk", "dv"), (dq, dk, dv), wants, strict=True):
        if got.shape != want.shape or str(got.dtype) != case.dtype:
            failures.append(f"{name} is {got.dtype} {got.shape}; allowed: {case.dtype} {want.shape}")
            continue
        verdict = Verdict(errors(got, want))
        _judge_positions(verdict, name, np.asarray(got, np.float64), want)
        difference = float(np.linalg.norm(_difference(np.asarray(got, np.float64), want)))
        bound = GRADIENT_L2[case.dtype] * condition
        least = LEAST[case.dtype] * np.sqrt(want.size) + CANCELLED * condition * scale
        if want.size >= ENOUGH_VALUES and sizes_known:
            verdict.expect(f"L2 error of {name}", difference, bound * _finite_size(want) + least)
        verdict.expect(f"L2 error of {name}, beside the largest gradient", difference, bound * scale + least)
        found[name] = verdict.errors
        failures += verdict.failures
    _raise_if_broken(case, failures, how, "check_backward")
    return found


def check_same_bits(
    case: Case,
    first: tuple,
    second: tuple,
    how: str = "",
    names: tuple[str, ...] = ("out", "lse"),
    function: str = "check",
) -> None:
    """Check that two runs on the same input have the same bits."""
    for name, a, b in zip(names, first, second, strict=True):
        if a.tobytes() != b.tobytes():
            failure = f"{name} differs between two runs on the same input; allowed: the same bits"
            _raise_if_broken(case, [failure], how, function)


def repro(case: Case, how: str = "", function: str = "check") -> str:
    """A line of code that runs the case again."""
    return f"from qflash.testing import *; {function}({case!r}{how})"


def _raise_if_broken(case: Case, failures: list[str], how: str = "", function: str = "check") -> None:
    if failures:
        raise ContractError("\n  ".join([f"{case.name}:", *failures, f"repro: {repro(case, how, function)}"]))


def _difference(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """got - want, or 0 where either is nonfinite: those values are compared by kind, not by distance."""
    finite = np.isfinite(got) & np.isfinite(want)
    return np.where(finite, got, 0.0) - np.where(finite, want, 0.0)


def _condition(want: Expected) -> np.ndarray:
    return np.maximum(1.0, want.distance / PLAIN_STRENGTH)


def _rounded_rotation(case: Case, strength: np.ndarray) -> np.ndarray:
    """The possible error of scores of this strength because rotated rows are rounded to 16 bits."""
    rounds = case.dtype != "float32" and case.rope is not None
    return 2 * HALF_FACTOR * UNIT_ROUNDOFF[case.dtype] * strength if rounds else np.zeros_like(strength)


def _least(case: Case) -> float:
    """The allowed absolute error of every output: next to a sink its true value may be too small for its dtype."""
    return LEAST[case.dtype] if case.sinks else 0.0


def _nonfinite_channels(case: Case) -> np.ndarray:
    """[B, 1, Hq, D]: where v has NaN or infinity in some key of the sequence. Padding is not among its keys."""
    nonfinite = ~np.isfinite(case.make_inputs().v.astype(np.float64))
    if case.kv_lens is not None:
        nonfinite &= np.arange(case.k_len)[:, None, None] < np.array(case.kv_lens)[:, None, None, None]
    return nonfinite.any(1, keepdims=True).repeat(case.q_heads // case.kv_heads, axis=2)


def _judge_positions(verdict: Verdict, name: str, got: np.ndarray, want: np.ndarray) -> None:
    for kind, test in (("NaN", np.isnan), ("+Inf", np.isposinf), ("-Inf", np.isneginf)):
        wrong = np.argwhere(test(got) != test(want))
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            verdict.failures.append(
                f"{name} has {kind} in other places than the oracle, {len(wrong)} in all, the first at {list(at)}: "
                f"{got[at]} instead of {want[at]}"
            )


def _judge_native(verdict: Verdict, case: Case, got: np.ndarray, want: Expected) -> None:
    condition = _condition(want)
    unit = UNIT_ROUNDOFF[case.dtype]
    bound = FLOAT32_L2 * float(condition.max(initial=1.0))
    row_bound = FLOAT32_ROW * condition
    if case.dtype != "float32":
        bound = max(bound, HALF_FACTOR * errors(want.rounded, want.out).relative_l2)
        # Storing out costs one rounding; rounding rotated q and k moves each score by its strength, twice.
        row_bound = row_bound + HALF_FACTOR * unit * (1 + (2 * want.strength if case.rope is not None else 0))
    size = float(np.linalg.norm(want.out[np.isfinite(want.out)]))
    if got.size >= ENOUGH_VALUES or verdict.errors.relative_l2 == np.inf:
        least = _least(case) * np.sqrt(got.size) / size if size else 0.0
        verdict.expect("relative L2 error", verdict.errors.relative_l2, bound + least)
    _judge_rows(verdict, case, got, want.out, want.weight, row_bound)
    if case.dtype == "float16" and case.data == "normal" and case.rope is None and case.scale is None:
        difference = np.abs(_difference(got, want.out))
        allowed = np.maximum(FLOAT16_ABSOLUTE, unit * np.abs(want.out) * (1 + FLOAT16_ABSOLUTE))
        excess = np.where(np.isfinite(want.out), difference - allowed, 0.0).max(initial=0.0)
        verdict.expect("excess over 1e-3 (or half an ulp) of a float16 value", excess, 0.0)


def _judge_rows(verdict: Verdict, case: Case, got: np.ndarray, want: np.ndarray, weight: np.ndarray, bound: np.ndarray):
    """Check each row separately, relative to its weight: one bad row cannot hide among thousands of good ones."""
    difference = _difference(got, want)
    norm = np.sqrt((difference * difference).sum(-1))
    norm = norm.T if case.packed else norm.swapaxes(-1, -2)
    allowed = bound * np.where(np.isfinite(weight), weight, np.inf) + _least(case) * np.sqrt(case.head_dim)
    over = np.where(norm > allowed, norm - allowed, 0.0)
    if over.any():
        at = np.unravel_index(over.argmax(), over.shape)
        where = [int(i) for i in at]
        verdict.failures.append(
            f"row {where} (indexed as lse) has error {norm[at]:.3g}; allowed: {allowed[at]:.3g} "
            f"({np.count_nonzero(over)} rows are over)"
        )


def _judge_quantized(verdict: Verdict, case: Case, figures: dict[str, float], integers: Integers) -> None:
    if verdict.errors.relative_l2 == np.inf:
        verdict.failures.append("out is not zero where no row sees a key")
    if np.prod(case._shapes()[0]) < figures["values"] or case.scale is not None:
        return
    if case.data == "normal":
        verdict.expect("cosine", verdict.errors.cosine, figures["cosine"], np.greater_equal)
        verdict.expect("relative L2 error", verdict.errors.relative_l2, figures["l2"])
    elif case.data == "biased_k":
        # Score errors that are independent with deviation s change weights by a factor 1 + s, and with many values v
        # around zero an output by s of its length, almost entirely orthogonal to it: 1 - cosine is s^2 / 2. Twice the
        # error is allowed, hence 2 s^2. Smoothing keeps s near 0.01, where that does not matter. But rope rotates the
        # bias by the position of each key, and smoothing cannot remove what keys no longer have in common.
        noise = float(score_noise(case, integers).max(initial=0.0))
        least = min(figures["biased_cosine"], 1 - 2 * noise * noise)
        verdict.expect("cosine", verdict.errors.cosine, least, np.greater_equal)


def _judge_lse(
    verdict: Verdict, case: Case, lse: np.ndarray, want: Expected, precision: str, integers: Integers
) -> None:
    if lse.shape != want.lse.shape or lse.dtype != np.float32:
        verdict.failures.append(f"lse is {lse.dtype} {lse.shape}; allowed: float32 {want.lse.shape}")
        return
    got = np.asarray(lse, np.float64)
    _judge_positions(verdict, "lse", got, want.lse)
    magnitude = np.abs(np.where(np.isfinite(want.lse), want.lse, 0.0))
    # The means that smoothing subtracted from the keys are added back in float32, with the error of unquantized scores.
    plain = want if precision == "native" else expected(case)
    allowed = LSE * (_condition(plain) + magnitude)
    if precision != "native":
        # A score changes by at most half a step of q for every k and vice versa, 1 / 254 of the strength; twice that is
        # allowed. The steps of a key are those of its scale group, even if a row sees only that key.
        allowed = allowed + QUANTIZED[precision]["lse"] * quantized_strength(case, integers)
    else:
        allowed = allowed + _rounded_rotation(case, want.strength)
    error = np.abs(_difference(got, want.lse))
    over = np.where(error > allowed, error - allowed, 0.0)
    if over.any():
        at = np.unravel_index(over.argmax(), over.shape)
        verdict.failures.append(
            f"lse at {[int(i) for i in at]} is {got[at]:.8g}, the oracle's {want.lse[at]:.8g}; "
            f"allowed: an error of {allowed[at]:.3g}"
        )
