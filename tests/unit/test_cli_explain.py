"""`qflash explain`: the kernel for a shape that is typed in, on a machine that need not be this one."""

from __future__ import annotations

import numpy as np
import pytest

import qflash
from qflash import dispatch, machine
from qflash.call.spec import Spec

Q = ("--q", "2,4096,32,128", "--kv", "2,4096,8,128")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((), "none"))


@pytest.fixture
def told(invoke):
    """told(words...): what `qflash explain` says, with runs of blanks as one."""

    def tell(*words: str, status: int = 0) -> str:
        result = invoke("explain", *words)
        assert result.exit_code == status, result.output
        return " ".join(result.output.replace("│", " ").split())

    return tell


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        (["--dtype", "bfloat16", "--causal", "--device", "cuda", "--arch", "90"], "sm90_fwd"),
        (["--arch", "90a", "--precision", "int8"], "sm90_int8"),
        (["--arch", "sm_80"], "fa_mma"),
        (["--arch", "80", "--dtype", "float32"], "fa"),
        (["--arch", "90", "--kernel", "unfused"], "unfused"),
        (["--window", "128,0", "--softcap", "30", "--scale", "0.1", "--padded", "--rope", "interleaved"], "cpu"),
    ],
)
def test_it_names_the_kernel(told, words, kernel):
    place = "compute capability" if "--arch" in words else "the CPU"
    assert told(*Q, *words).startswith(f"{kernel} serves this problem on {place}")


def test_it_says_the_same_as_python(told):
    q = np.zeros((2, 40, 4, 64), np.float32)
    explanation = qflash.explain(q, q, q, window=(3, 0), precision="int8")
    assert str(explanation).splitlines()[0] == "cpu_int8 serves this problem on the CPU"
    said = told("--q", "2,40,4,64", "--dtype", "float32", "--window", "3,0", "--precision", "int8")
    assert said.startswith(f"{explanation.kernel} serves")
    for name, verdict, why in explanation.shown:
        assert f"{name} {verdict} {why}" in said
    assert all(line in said for line in explanation.lines)


def test_what_one_should_know_of_the_choice_is_noted(told):
    said = told(*Q, "--arch", "90", "--precision", "int8")
    assert "note: below 8192 queries and keys sm90_fwd is usually faster" in said


def test_rope_and_packing_reach_the_kernels(told):
    assert "unfused no takes no rope" in told(*Q, "--arch", "90", "--rope", "half")


def test_the_gpu_at_hand_is_the_default(told, monkeypatch):
    gpu = machine.Gpu("NVIDIA A100", 80, 81920, "580.1")
    monkeypatch.setattr(machine, "gpus", lambda: ((gpu,), ""))
    assert told(*Q).startswith("fa_mma serves this problem on compute capability 8.0")
    assert told(*Q, "--device", "cpu").startswith("cpu serves this problem on the CPU")


@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        (["--q", "2,4096,32"], "'2,4096,32' is no shape [batch, tokens, heads, head_dim]; allowed: 4 whole numbers", 2),
        (["--q", "2,4096,a,64"], "allowed: 4 whole numbers with commas", 2),
        (["--q", "1,1,3,64", "--kv", "1,1,2,64"], "Error: k has 2 heads; allowed: a divisor of q's 3 heads", 1),
        (["--q", "1,1,1,64", "--kv", "1,1,1,32"], "Error: k has head_dim 32; allowed: q's, 64", 1),
        (["--q", "1,1,1,64", "--device", "cuda"], "--arch is missing, and there is no GPU here to ask; allowed:", 2),
        (["--q", "1,1,1,64", "--device", "cpu", "--arch", "90"], "--arch is 90 and --device is cpu", 2),
        (["--q", "1,1,1,64", "--arch", "80,90"], "'80,90' has several; allowed: one", 2),
        (["--q", "1,1,1,64", "--kernel", "nonsense"], "Error: kernel is 'nonsense'; allowed: None, 'cpu'", 1),
        (["--q", "1,1,1,64", "--kernel", "fa"], "Error: kernel 'fa' cannot serve this problem: runs on cuda", 1),
    ],
)
def test_what_cannot_be_is_refused(told, words, message, status):
    assert message in told(*words, status=status)


def test_a_kernel_of_another_device_is_judged_as_far_as_it_can_be():
    """Which GPU it would be is not known; what no GPU would serve, is."""
    on_cpu = Spec("cpu", 0, "float32", 100)
    assert dispatch.reasons(dispatch.BY_NAME["sm90_fwd"], on_cpu) == [
        "runs on cuda, the arrays are on cpu",
        "takes float16, bfloat16, not float32",
        "head_dim is 100; the copy engine takes multiples of 8, rows of whole 16 bytes",
    ]
    halves = Spec("cpu", 0, "bfloat16", 64)
    assert dispatch.reasons(dispatch.BY_NAME["fa_mma"], halves) == ["runs on cuda, the arrays are on cpu"]


def test_what_no_device_would_serve_is_named_in_a_line(told):
    """Reasons are shown of kernels for this device, and of those that would serve the call on another."""
    said = told("--q", "1,128,4,64", "--dtype", "float32", "--device", "cpu")
    assert "fa no runs on cuda, the arrays are on cpu" in said and "cpu_int8 no takes precision" in said
    named = said.partition("not for this call on any device: ")[2].partition(" gradients")[0].split(", ")
    on_cpu = Spec("cpu", 0, "float32", 64)
    cuda = dispatch.kernels_of("attention", "cuda")
    assert named == [row.name for row in cuda if len(dispatch.reasons(row, on_cpu)) > 1] != []
    assert "on any device" not in told(*Q, "--device", "cpu", "--precision", "int8_fp8", "--batch-invariant")


def test_gradients_keep_to_the_limit_that_is_typed_in(told):
    long = ("--q", "1,16384,16,128", "--arch", "90")
    assert "dQ from dS kept in" in told(*long)
    assert "dQ from S and dP computed again: 0 bytes" in told(*long, "--backward-memory", "0")
    assert "Invalid value for '--backward-memory'" in told(*long, "--backward-memory", "-1", status=2)
