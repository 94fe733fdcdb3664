"""The command line: what a new user types first."""

import sys

import pytest
from click.testing import CliRunner

import qflash
from qflash import cli, machine
from qflash.cli import usable
from qflash.dispatch import KERNELS
from qflash.testing import ContractError, cases


@pytest.fixture
def invoke():
    def run(*arguments):
        return CliRunner().invoke(cli.main, arguments)

    return run


def test_help_lists_the_commands(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("run", "doctor", "verify", "bench", "report"):
        assert f"\n  {command} " in result.output


def test_version(invoke):
    assert qflash.__version__ in invoke("--version").output


def test_doctor_names_every_kernel_and_framework(invoke):
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for word in (machine.cpu_name().split()[0], "numpy", "torch", "jax", *(kernel.name for kernel in KERNELS)):
        assert word in result.output


def test_doctor_says_why_cuda_kernels_cannot_run(invoke, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((), "the moon is in the wrong phase"))
    assert "no NVIDIA GPU: the moon is in the wrong phase" in invoke("doctor").output


def test_an_old_gpu_is_refused_by_its_compute_capability(monkeypatch):
    old = machine.Gpu("NVIDIA Old", 61, 8000, "500.1")
    monkeypatch.setattr(machine, "gpus", lambda: ((old,), ""))
    assert "needs compute capability 7.5, the best GPU here has 6.1" in usable.usable_kernels()["fa"].why_not


def test_gpus_are_read_from_nvidia_smi():
    text = "NVIDIA H200, 9.0, 143771, 580.159.03\nNVIDIA GeForce RTX 4090, 8.9, 24564, 580.1\n"
    h200, rtx = machine.parse_gpus(text)
    assert (h200.name, h200.arch, h200.memory_mib, h200.driver) == ("NVIDIA H200", 90, 143771, "580.159.03")
    assert (rtx.arch, machine.slug(rtx.name)) == (89, "nvidia-geforce-rtx-4090")


@pytest.mark.parametrize(
    ("name", "folder"),
    [("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", "intel-core-i7-9750h-cpu"), ("AMD EPYC 7763", "amd-epyc-7763")],
)
def test_machine_names_become_folder_names(name, folder):
    assert machine.slug(name) == folder


@pytest.fixture
def two_cases(monkeypatch):
    """A case list short enough for a unit test."""
    chosen = cases("quick")[:2]
    monkeypatch.setattr("qflash.testing.cases", lambda tag: chosen)


def test_verify_counts_what_passed(invoke, two_cases):
    result = invoke("verify", "--kernel", "cpu", "--quick")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if line.startswith("│ cpu "))
    assert [cell.strip() for cell in line.split("│")[2:5]] == ["2", "0", "0"]


def test_verify_fails_loudly(invoke, two_cases, monkeypatch):
    def broken(*arguments):
        raise ContractError("out is wrong; repro: this line")

    monkeypatch.setattr("qflash.testing.check", broken)
    result = invoke("verify", "--kernel", "cpu")
    assert result.exit_code == 1
    assert "FAILED cpu out is wrong; repro: this line" in result.output


def test_verify_repeats_on_request(invoke, two_cases, monkeypatch):
    monkeypatch.setattr("qflash.testing.repeat.check_repeats", lambda kernel, times: times - 7)
    result = invoke("verify", "--kernel", "cpu", "--repeat", "10")
    assert result.exit_code == 0, result.output
    assert "cpu: 3 large problems, 10 runs each, the same bits" in result.output

    def unsteady(kernel, times):
        raise ContractError("out differs between two runs")

    monkeypatch.setattr("qflash.testing.repeat.check_repeats", unsteady)
    result = invoke("verify", "--kernel", "cpu", "--repeat", "10")
    assert result.exit_code == 1
    assert "out differs between two runs" in result.output


def test_verify_refuses_unknown_kernels(invoke):
    result = invoke("verify", "--kernel", "nonsense")
    assert result.exit_code == 2
    assert "'nonsense' is no kernel of attention; allowed: cpu" in result.output


def test_verify_of_a_kernel_that_cannot_run_here_fails(invoke, two_cases, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((), "none"))
    result = invoke("verify", "--kernel", "fa")
    assert result.exit_code == 1
    assert "fa cannot run here: no NVIDIA GPU" in result.output


def test_bench_refuses_unknown_presets(invoke):
    result = invoke("bench", "nonsense")
    assert result.exit_code == 2
    assert "'nonsense' is no preset; allowed: cpu" in result.output


def test_bench_of_a_missing_device_points_to_doctor(invoke, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((), "none"))
    result = invoke("bench", "cuda")
    assert result.exit_code == 1
    assert "qflash doctor" in result.output


def test_without_a_checkout_benchmarks_say_where_they_live(invoke, monkeypatch, tmp_path):
    monkeypatch.setattr(qflash, "__file__", str(tmp_path / "qflash" / "__init__.py"))
    result = invoke("report", "--check")
    assert result.exit_code == 1
    assert "source checkout" in result.output


def test_doctor_imports_no_framework():
    import subprocess

    code = "import sys; from qflash.cli import main; main(['doctor'], standalone_mode=False); "
    code += "assert not {'torch', 'jax'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("QFLASH_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_cache_is_shown_and_cleared(invoke, cache_dir):
    entry = cache_dir / "kernels-1" / "fa-sm_80-0123456789abcdef01234567"
    entry.mkdir(parents=True)
    (entry / "kernel.so").write_bytes(bytes(1 << 20))
    assert "1 entries, 1.0 MiB" in invoke("cache").output
    assert "removed 1 entries" in invoke("cache", "--clear").output
    assert list(cache_dir.rglob("*")) == [entry.parent]


def test_build_compiles_what_was_asked_for(invoke, monkeypatch):
    asked = {}

    def build(arches, kernels, progress):
        asked.update(arches=arches, kernels=kernels)

    monkeypatch.setattr("qflash.backends.cuda.build", build)
    result = invoke("build", "--arch", "80,90a", "--kernel", "fa")
    assert result.exit_code == 0, result.output
    assert asked == {"arches": [80, 90], "kernels": ("fa",)}


@pytest.mark.parametrize("arch", ["hopper", "9", "80;90", ""])
def test_build_refuses_what_is_no_architecture(invoke, arch):
    result = invoke("build", "--arch", arch)
    assert result.exit_code == 2
    assert "is no architecture; allowed: compute capabilities" in result.output


def test_build_without_a_compiler_says_what_to_install(invoke, monkeypatch, cache_dir):
    def find():
        raise qflash.ToolchainError("no nvcc; install one")

    monkeypatch.setattr("qflash.jit.toolchain.find", find)
    result = invoke("build", "--arch", "80", "--kernel", "fa")
    assert result.exit_code == 1
    assert "no nvcc; install one" in result.output
    assert "no CUDA compiler: pip install" in usable.usable_kernels()["fa"].why_not
