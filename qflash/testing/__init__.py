"""Cases, comparison and timers, shared by tests, `qflash verify` and benchmarks. Not imported by qflash itself."""

from qflash.testing.case import Case, Inputs, Rotary
from qflash.testing.cases import BY_NAME, CASES, cases
from qflash.testing.compare import ContractError, Errors, check_contract, check_gradients, errors, judge, repro
from qflash.testing.oracle import expected, expected_gradients
from qflash.testing.runner import FRAMEWORKS, check, check_backward, run_backward, run_case

__all__ = [
    "BY_NAME",
    "CASES",
    "FRAMEWORKS",
    "Case",
    "ContractError",
    "Errors",
    "Inputs",
    "Rotary",
    "cases",
    "check",
    "check_backward",
    "check_contract",
    "check_gradients",
    "errors",
    "expected",
    "expected_gradients",
    "judge",
    "repro",
    "run_backward",
    "run_case",
]
