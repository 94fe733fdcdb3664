"""Every case on every kernel this machine can run, held against docs/numerics.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from qflash import NoKernelError, dispatch
from qflash.testing import BY_NAME, Case, cases, check, check_backward, oracle, run_backward, run_case
from qflash.testing.compare import check_contract, check_same_bits
from qflash.testing.runner import arch_of, refusals, suited

CPU_KERNELS = [row.name for kv in ("arrays", "pages") for row in dispatch.variants_of("attention", "cpu", kv)]
CUDA_KERNELS = [kernel.name for kernel in dispatch.variants_of("attention", "cuda")]
CPU_BACKWARD, CUDA_BACKWARD = (
    [row.name for row in dispatch.variants_of("attention_backward", device)] for device in ("cpu", "cuda")
)
# Gradients are defined for finite inputs; what stands in the padding must not matter to them either.
DIFFERENTIABLE = [case for case in cases() if case.finite or case.name.startswith("nan_in_padding")]


def by_name(case: Case) -> str:
    return case.name


def check_or_refused(case: Case, kernel: str, framework: str) -> None:
    """The contract holds, or dispatch says beforehand that this kernel cannot serve the case."""
    device = "cuda" if framework.endswith("cuda") else "cpu"
    if refusals(case, kernel, arch_of(device)):
        with pytest.raises(NoKernelError, match=kernel):
            run_case(case, kernel, framework)
    else:
        check(case, kernel, framework)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("case", cases("full"), ids=by_name)
def test_contract(case: Case, kernel: str) -> None:
    check_or_refused(case, kernel, "native")


# Oracles of INT8 take longest; windows and 16 bits occur in small cases.
SELDOM_IN_INT8 = ("t2048_half", "t4096_window")


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        pytest.param(
            *(case, kernel),
            id=f"{case.name}-{kernel}",
            marks=[pytest.mark.slow] if kernel == "cpu_int8" and case.name in SELDOM_IN_INT8 else [],
        )
        for case in cases("large")
        for kernel in CPU_KERNELS
    ],
)
def test_contract_large(case: Case, kernel: str) -> None:
    check_or_refused(case, kernel, "native")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CUDA_KERNELS)
@pytest.mark.parametrize("case", cases("full") + cases("large"), ids=by_name)
def test_contract_cuda(case: Case, kernel: str) -> None:
    check_or_refused(suited(case, kernel, arch_of("cuda")), kernel, "native-cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CUDA_KERNELS)
@pytest.mark.parametrize("bad", [-1, 41, 2**31 - 1])
def test_a_length_out_of_range_on_the_gpu_is_nan_for_its_sequence_only(bad: int, kernel: str) -> None:
    good = suited(Case("bad_length", 30, 40, batch=3, kv_lens=(20, 0, 40), causal=True), kernel, arch_of("cuda"))
    out, lse = run_case(replace(good, kv_lens=(20, bad, 40)), kernel, "native-cuda")
    assert np.isnan(out[1].astype(np.float32)).all() and np.isnan(lse[1]).all()
    want_out, want_lse = run_case(good, kernel, "native-cuda")
    for b in (0, 2):
        assert out[b].tobytes() == want_out[b].tobytes() and lse[b].tobytes() == want_lse[b].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CUDA_KERNELS)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_outputs_may_begin_at_any_element_on_the_gpu(head_dim: int, kernel: str) -> None:
    case = suited(Case("odd", 150, 200, 4, 2, head_dim, batch=2, causal=True), kernel, arch_of("cuda"))
    aligned, odd = (run_case(case, kernel, "native-cuda", out_shift=shift) for shift in (0, 1))
    variant = dispatch.VARIANTS[kernel]
    if variant.kernel.page == "triton":  # tiles of another shape serve what is no vector
        check_contract(case, *odd, variant.contract, integers=oracle.integers_of(kernel))
    else:
        check_same_bits(case, aligned, odd)


@pytest.mark.parametrize("kernel", CPU_BACKWARD)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=by_name)
def test_gradients(case: Case, kernel: str) -> None:
    check_backward(case, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CUDA_BACKWARD)
@pytest.mark.parametrize("case", cases("full") + cases("large"), ids=by_name)
def test_gradients_cuda(case: Case, kernel: str) -> None:
    check_backward(suited(case, kernel, arch_of("cuda")), kernel, "native-cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [name for name in CUDA_BACKWARD if dispatch.BY_NAME[name].drops_ds is not None])
@pytest.mark.parametrize("case", cases("full") + cases("large"), ids=by_name)
def test_gradients_without_memory_for_ds_cuda(case: Case, kernel: str) -> None:
    check_backward(suited(case, kernel, arch_of("cuda")), kernel, "native-cuda", memory=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", CUDA_BACKWARD)
@pytest.mark.parametrize("bad", [-1, 41, 2**31 - 1])
def test_a_length_out_of_range_on_the_gpu_makes_gradients_of_its_sequence_nan(bad: int, kernel: str) -> None:
    good = suited(Case("bad_length", 30, 40, batch=3, kv_lens=(20, 0, 40), causal=True), kernel, arch_of("cuda"))
    want = run_backward(good, kernel, "native-cuda")
    for x, y in zip(run_backward(replace(good, kv_lens=(20, bad, 40)), kernel, "native-cuda"), want, strict=True):
        assert np.isnan(x[1].astype(np.float32)).all()
        assert all(x[b].tobytes() == y[b].tobytes() for b in (0, 2))


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("case", cases("quick"), ids=by_name)
def test_any_number_of_threads(case: Case, threads: int, kernel: str) -> None:
    result = run_case(case, kernel, num_threads=threads)
    check_contract(case, *result, dispatch.VARIANTS[kernel].precision)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("case", cases("full"), ids=by_name)
def test_numpy_front_end_gives_the_same_bits(case: Case, kernel: str) -> None:
    check_same_bits(case, run_case(case, kernel, "native"), run_case(case, kernel, "numpy"))


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_other_instruction_sets(isa: str) -> None:
    """The paths this machine would not choose by itself; asking for one that it lacks falls back to one it has."""
    names = [case.name for case in cases("quick")] + ["dim_3", "dim_100", "dim_255", "float16_rope", "bfloat16_rope"]
    script = (
        "import json, sys\n"
        "from qflash import _native\n"
        "from qflash.testing import BY_NAME, check\n"
        "failures = {}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    for kernel in json.loads(sys.argv[2]):\n"
        "        try:\n"
        "            check(BY_NAME[name], kernel)\n"
        "        except Exception as error:\n"
        "            failures[f'{name} {kernel}'] = str(error)\n"
        "print(json.dumps({'isa': _native.cpu_isa(), 'failures': failures}))\n"
    )
    assert set(names) <= set(BY_NAME)
    ran = subprocess.run(
        [sys.executable, "-c", script, json.dumps(names), json.dumps(CPU_KERNELS)],
        env={**os.environ, "QFLASH_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["failures"] == {}
    if isa == "generic":
        assert report["isa"] == "generic"
