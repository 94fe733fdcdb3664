"""QFLASH_CUDA_ARCH: kernels of an older architecture, as PTX, on the GPU at hand."""

from pathlib import Path

import pytest

from qflash import machine
from qflash.backends import arch, cuda
from qflash.call.spec import Spec
from qflash.cli import doctor, usable
from qflash.jit import compiler, toolchain

TOOLS = toolchain.Toolchain("nvcc", "PATH", "13.0.88", ())


@pytest.fixture
def ask(monkeypatch):
    """ask("75") sets the variable; None unsets it."""

    def change(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv(arch.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(arch.VARIABLE, value)
        arch.asked.cache_clear()

    change(None)
    yield change
    arch.asked.cache_clear()


def test_the_gpus_own_architecture_unless_asked(ask):
    assert [arch.arch_for(capability) for capability in (75, 87, 90, 120)] == [75, 87, 90, 120]
    ask("")
    assert arch.arch_for(90) == 90


@pytest.mark.parametrize("wanted", arch.ARCHES)
def test_an_older_architecture(ask, wanted):
    ask(str(wanted))
    assert arch.arch_for(90) == wanted


@pytest.mark.parametrize("text", ["70", "90a", "7.5", "sm_80", "hopper"])
def test_other_words_are_refused(ask, text):
    ask(text)
    with pytest.raises(ValueError, match=f"QFLASH_CUDA_ARCH is {text!r}; allowed: 75, 80, 86, 89, 90"):
        arch.arch_for(90)


def test_a_newer_architecture_is_refused(ask):
    ask("90")
    with pytest.raises(ValueError, match=r"QFLASH_CUDA_ARCH is 90, .* capability 8.6; allowed: 75, 80, 86$"):
        arch.arch_for(86)


def test_code_for_hopper_is_for_hopper_alone(ask):
    ask("90")
    with pytest.raises(ValueError, match=r"QFLASH_CUDA_ARCH is 90, .* capability 12.0; allowed: 75, 80, 86, 89$"):
        arch.arch_for(120)


def test_a_kernel_for_one_architecture_is_compiled_for_it_alone():
    units = cuda.specialisations((*arch.ARCHES, 100, 120), ["sm90_fwd"])
    assert {unit.target for unit in units} == {"90a"}
    assert {dict(unit.defines)["QF_HEAD_DIM"] for unit in units} == {"64", "96", "112", "128", "192", "256"}
    assert len(units) == 2 * 6 * 2 * 2  # dtypes, head dims, plain scores or not, arrays or pages
    for head_dim, bucket in ((8, "64"), (64, "64"), (72, "96"), (104, "112"), (120, "128"), (256, "256")):
        unit = cuda.unit(cuda.BY_NAME["sm90_fwd"], Spec("cuda", 90, "bfloat16", head_dim))
        assert unit in units and dict(unit.defines)["QF_HEAD_DIM"] == bucket


@pytest.mark.parametrize(
    ("capability", "asked", "why"),
    [
        (80, None, "needs compute capability 9.0, the best GPU here has 8.0"),
        (90, None, ""),
        (90, "80", "needs compute capability 9.0, QFLASH_CUDA_ARCH asks for 8.0"),
        (120, None, "runs on compute capability 9.0 alone, the best GPU here has 12.0"),
    ],
)
def test_the_usable_list_knows_kernels_for_one_architecture(ask, monkeypatch, capability, asked, why):
    monkeypatch.setattr(machine, "gpus", lambda: ((machine.Gpu("a GPU", capability, 141000, "580"),), ""))
    monkeypatch.setattr(toolchain, "find", lambda: TOOLS)
    ask(asked)
    assert usable.usable_kernels()["sm90_fwd"].why_not == why
    assert not usable.usable_kernels()["fa_mma"].why_not


def test_units_become_ptx_and_have_keys_of_their_own(ask):
    row, spec = cuda.BY_NAME["fa"], Spec("cuda", 80, "float16", 64)
    plain = cuda.unit(row, spec)
    ask("80")
    ptx = cuda.unit(row, spec)
    assert (plain.ptx, ptx.ptx) == (False, True)
    assert plain.defines == ptx.defines
    keys = [compiler.key_of(unit, TOOLS) for unit in (plain, ptx)]
    assert keys[0].startswith("fa-sm_80-")
    assert keys[1].startswith("fa-compute_80-")
    assert keys[0].split("-")[-1] != keys[1].split("-")[-1]
    (command,) = compiler.commands(ptx, TOOLS, (), Path("kernel.so"), Path("objects"))
    assert "-gencode=arch=compute_80,code=compute_80" in command
    assert not cuda.unit(row, Spec("cuda", 75, "float16", 64)).ptx


def test_doctor_and_the_usable_list_say_so(ask, monkeypatch):
    gpu = machine.Gpu("NVIDIA H200", 90, 141000, "580")
    monkeypatch.setattr(machine, "gpus", lambda: ((gpu,), ""))
    monkeypatch.setattr(toolchain, "find", lambda: TOOLS)
    assert "CUDA kernels" not in dict(doctor.hardware())
    ask("75")
    assert "compute capability 7.5, compiled to PTX" in dict(doctor.hardware())["CUDA kernels"]
    assert not usable.usable_kernels()["fa"].why_not
    ask("74")
    assert "QFLASH_CUDA_ARCH is '74'" in dict(doctor.hardware())["CUDA kernels"]
    assert "QFLASH_CUDA_ARCH is '74'" in usable.usable_kernels()["fa"].why_not
