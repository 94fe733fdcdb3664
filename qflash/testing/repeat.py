"""Same input, same bits, in every run: a few problems run many times on arrays at fixed addresses.

A missing barrier shows up once in hundreds of runs, and only if many blocks are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qflash import dispatch
from qflash.errors import NoKernelError
from qflash.testing import runner
from qflash.testing.case import Case, Rotary
from qflash.testing.compare import check_same_bits

# They include every dtype, so that each kernel supports one, more blocks than an H200 has SMs, and tiles that are full,
# masked and cut.
_MANY = {"batch": 2, "q_heads": 8, "kv_heads": 8}
REPEATED = (
    Case("repeat_causal", 1000, 1000, head_dim=128, dtype="float16", causal=True, **_MANY | {"kv_heads": 2}),
    Case("repeat_rope", 700, 900, head_dim=64, dtype="bfloat16", rope=Rotary(64), **_MANY),
    Case("repeat_window", 600, 600, head_dim=80, window=(200, 60), kv_lens=(600, 333), **_MANY),
)


def check_repeats(kernel: str, times: int, load: Callable[[int], None] | None = None) -> int:
    """Run each problem that `kernel` supports `times` times; ContractError if one differs. Returns their number.

    load(i): additional work for the machine during run i.
    """
    if dispatch.VARIANTS[kernel].kernel.op == "attention_backward":
        return _check_repeated_gradients(kernel, times, load)
    framework = "torch-cuda" if dispatch.VARIANTS[kernel].device == "cuda" else "numpy"
    served = 0
    for case in REPEATED:
        if dispatch.VARIANTS[kernel].kernel.few_rows:
            case = runner.suited(case, kernel, runner.arch_of("cuda"))
        inputs = runner.convert(case.make_inputs(), framework)

        def results(case=case, inputs=inputs):
            return tuple(runner.to_numpy(x) for x in runner.call(case, inputs, kernel))

        try:
            first = results()
        except NoKernelError:
            continue
        served += 1
        for index in range(1, times):
            if load is not None:
                load(index)
            check_same_bits(case, first, results(), f", {kernel!r}, {framework!r}  # run {index}")
    return served


def _check_repeated_gradients(kernel: str, times: int, load: Callable[[int], None] | None) -> int:
    variant = dispatch.VARIANTS[kernel]
    framework = "native-cuda" if variant.device == "cuda" else "native"
    served = 0
    for case in REPEATED:
        if case.dtype not in variant.dtypes:
            continue
        served += 1
        if framework == "native-cuda":
            results = runner.CudaCall(*runner.planned_backward(case, kernel, framework)).run
        else:
            results = partial(runner.run_backward, case, kernel, framework)
        first = tuple(results())
        for index in range(1, times):
            if load is not None:
                load(index)
            how = f", {kernel!r}, {framework!r}"
            names = ("dq", "dk", "dv")
            check_same_bits(case, first, tuple(results()), f"{how}  # run {index}", names, "check_backward")
    return served
