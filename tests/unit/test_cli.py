"""The command line: what a new user types first."""

import re
import sys

import click
import pytest

import qflash
from qflash import machine
from qflash.cli import bench, usable
from qflash.dispatch import KERNELS
from qflash.testing import ContractError, cases
from qflash.testing.compare import Errors


def test_help_lists_the_commands(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("run", "doctor", "verify", "bench", "report"):
        assert f"\n  {command} " in result.output
    told = result.output.partition("Commands:\n")[2]
    assert told.startswith("  doctor ") and "..." not in told, "each command is told in a whole line"


def test_version(invoke):
    assert qflash.__version__ in invoke("--version").output


def test_doctor_names_every_kernel_and_framework(invoke):
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for word in (machine.cpu_name().split()[0], "numpy", "torch", "jax", *(kernel.name for kernel in KERNELS)):
        assert word in result.output


def test_doctor_says_once_why_cuda_kernels_cannot_run(invoke, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((), "the moon is in the wrong phase"))
    said = invoke("doctor").output
    assert said.count("no NVIDIA GPU: the moon is in the wrong phase") == 1
    listed = " ".join(said.partition("the moon")[2].split())
    assert [row.name for row in KERNELS if row.device == "cuda" and row.name not in listed] == []


def test_verify_says_once_why_kernels_cannot_run(invoke, two_cases, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((), "the moon is in the wrong phase"))
    monkeypatch.setattr("qflash.testing.check", lambda *words: Errors(0.0, 0.0, 1.0, 0.0, 0.0))
    said = invoke("verify").output
    assert said.count("the moon is in the wrong phase") == 1
    assert ", fa_mma, fa, " in said


def test_text_is_printed_as_it_is(invoke, monkeypatch):
    """Brackets are no markup, and colons no emoji."""
    text = "the GPU [bold]at bay[/bold] 7 is :smile: gone [/]"
    monkeypatch.setattr(machine, "gpus", lambda: ((), text))

    def find():
        raise qflash.ToolchainError("get nvcc with pip install 'qflash[cuda]'")

    monkeypatch.setattr("qflash.jit.toolchain.find", find)
    said = " ".join(invoke("doctor").output.split())
    assert f"GPU none: {text}" in said
    assert "get nvcc with pip install 'qflash[cuda]'" in said
    assert f"no NVIDIA GPU: {text}" in said.partition("Kernels")[2]
    said = " ".join(invoke("verify", "--kernel", "fa").output.split())
    assert f"fa cannot run here: no NVIDIA GPU: {text}" in said


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
        raise ContractError("out is wrong; repro: this line, q[0]")

    monkeypatch.setattr("qflash.testing.check", broken)
    result = invoke("verify", "--kernel", "cpu")
    assert result.exit_code == 1
    assert "FAILED cpu out is wrong; repro: this line, q[0]" in result.output


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


def test_bench_helps_with_its_presets(invoke, monkeypatch):
    told = invoke("bench", "--help").output
    assert re.search(r"Presets:\n  cpu +CPU forward", told)
    assert all(f"\n  {name} " in told for name in bench.load("presets").PRESETS)

    def no_checkout(name):
        raise click.ClickException("no checkout")

    monkeypatch.setattr(bench, "load", no_checkout)
    told = invoke("bench", "--help")
    assert told.exit_code == 0 and "--dry-run" in told.output and "Presets:" not in told.output


def test_bench_says_what_to_do_with_its_rows(invoke, monkeypatch):
    written = []
    monkeypatch.setattr(bench, "measured", lambda console, presets, **options: ((preset, []) for preset in presets))
    monkeypatch.setattr(bench, "write", lambda console, name, rows: written.append(name))
    assert "qflash report" not in invoke("bench", "cpu-decode", "--dry-run").output and written == []
    assert "`qflash report` puts these rows into the pages" in invoke("bench", "cpu-decode").output
    assert written == ["cpu-decode"]


@pytest.mark.parametrize("budget", ["-1", "0", "nan", "inf", "-inf", "soon"])
def test_bench_refuses_what_is_no_time_span(invoke, budget):
    result = invoke("bench", "nonsense", "--budget", budget)
    assert result.exit_code == 2
    assert f"'{budget}' is no time span; allowed: a number of seconds greater than 0, and finite" in result.output


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize("threads", ["0", "1025", "99999999999"])
def test_threads_have_a_range(invoke, command, threads):
    result = invoke(command, "--threads", threads)
    assert result.exit_code == 2
    assert f"{threads} is not in the range 1<=x<=1024" in result.output


def test_drawings_go_into_a_folder_that_is_there(invoke, tmp_path):
    result = invoke("roofline", "--out", str(tmp_path / "missing" / "roofline.svg"))
    assert result.exit_code == 2
    assert f"{tmp_path / 'missing'} is no directory" in result.output


def test_profiles_do_not_go_into_a_file(invoke, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = invoke("profile", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "is a file" in result.output


def test_bench_of_a_missing_device_points_to_doctor(invoke, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ((), "none"))
    result = invoke("bench", "cuda")
    assert result.exit_code == 1
    assert "qflash doctor" in result.output


def test_without_a_checkout_benchmarks_say_where_they_live(invoke, monkeypatch, tmp_path):
    monkeypatch.setattr(qflash, "__file__", str(tmp_path / "qflash" / "__init__.py"))
    result = invoke("report", "--check")
    assert result.exit_code == 1
    assert "needs the source checkout" in result.output and "make build" in result.output


@pytest.mark.process
def test_doctor_imports_no_framework():
    import subprocess

    code = "import sys; from qflash.cli import main; main(['doctor'], standalone_mode=False); "
    code += "assert not {'torch', 'jax'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_build_compiles_what_was_asked_for(invoke, monkeypatch, cache_dir):
    asked = {}

    def build(arches, kernels, progress):
        asked.update(arches=arches, kernels=kernels)

    monkeypatch.setattr("qflash.backends.cuda.build", build)
    result = invoke("build", "--arch", "80,90a,9.0,sm_120", "--kernel", "fa")
    assert result.exit_code == 0, result.output
    assert asked == {"arches": [80, 90, 90, 120], "kernels": ("fa",)}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("75", "--kernel", "sm90_fwd"), "sm90_fwd needs compute capability 9.0, --arch is 7.5"),
        (("80,12", "--kernel", "fa"), "fa needs compute capability 7.5, --arch is 1.2"),
        (("100", "--kernel", "sm90_fwd"), "sm90_fwd runs on compute capability 9.0 alone, --arch is 10.0"),
    ],
)
def test_build_refuses_what_no_kernel_runs_on(invoke, words, why):
    result = invoke("build", "--arch", *words)
    assert result.exit_code == 2
    assert f"no kernel runs on it: {why}" in " ".join(result.output.split())


def test_build_says_how_many_libraries_the_cache_has(invoke, monkeypatch, cache_dir):
    names = []

    def is_compiled(unit, cache):
        names.append(unit.name)
        return len(names) == 1

    monkeypatch.setattr("qflash.cli.cuda.is_compiled", is_compiled)
    monkeypatch.setattr("qflash.backends.cuda.build", None)  # nothing is compiled
    result = invoke("build", "--arch", "80", "--kernel", "softmax", "--dry-run")
    assert result.exit_code == 0, result.output
    assert f"1 of {len(names)} libraries are there; {cache_dir}: 0 entries" in result.output and len(names) == 3


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
