"""Variables that qflash cannot use: one clean error from every command that needs them, and a word from the doctor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qflash.backends import arch
from qflash.jit import toolchain


@pytest.fixture
def bad(monkeypatch, tmp_path):
    """bad(name): set the variable to something wrong; returns what must be said of it."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    values = {
        "threads": ("QFLASH_NUM_THREADS", "two", "QFLASH_NUM_THREADS is 'two'; allowed: 1 or more"),
        "no threads": ("QFLASH_NUM_THREADS", "0", "QFLASH_NUM_THREADS is '0'; allowed: 1 or more"),
        "arch": (arch.VARIABLE, "74", "QFLASH_CUDA_ARCH is '74'; allowed: 75, 80"),
        "nvcc": ("QFLASH_NVCC", "/nowhere/nvcc", "QFLASH_NVCC is '/nowhere/nvcc': no usable CUDA compiler"),
        "a file": ("QFLASH_CACHE_DIR", str(tmp_path / "file"), f"{tmp_path / 'file'} is no directory"),
        "in a file": ("QFLASH_CACHE_DIR", str(tmp_path / "file" / "x"), f"{tmp_path / 'file' / 'x'} is no directory"),
        "open": ("QFLASH_CACHE_DIR", str(tmp_path / "open"), f"{tmp_path / 'open'} has mode 0777"),
    }

    def set_one(name: str) -> str:
        variable, value, words = values[name]
        monkeypatch.setenv(variable, value)
        arch.asked.cache_clear()
        toolchain.find.cache_clear()
        return words

    yield set_one
    monkeypatch.undo()
    arch.asked.cache_clear()
    toolchain.find.cache_clear()


NAMES = ("threads", "no threads", "arch", "nvcc", "a file", "in a file", "open")
COMMANDS = (
    ["verify", "--kernel", "cpu", "--quick"],
    ["build", "--arch", "90", "--kernel", "softmax"],
    ["run"],
    ["bench"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("name", NAMES)
def test_commands_refuse_a_bad_variable_in_one_line(invoke, bad, command, name):
    words = bad(name)
    result = invoke(*command)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)  # no traceback
    assert result.output.startswith(f"Error: {words}")


@pytest.mark.parametrize("name", NAMES)
def test_doctor_reports_a_bad_variable(invoke, bad, name):
    words = bad(name)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert words in " ".join(result.output.partition("To be put right")[2].split())


@pytest.mark.parametrize("text", ["1", " 2", "+3", "99999999999999999999"])
def test_what_the_engine_takes_is_no_problem(monkeypatch, text):
    from qflash.cli import environment

    monkeypatch.setenv("QFLASH_NUM_THREADS", text)
    assert environment.problems() == []


def test_help_needs_no_sound_environment(invoke, bad):
    bad("arch")
    assert invoke("build", "--help").exit_code == 0


def test_build_does_not_go_to_another_folder_than_asked_for(invoke, monkeypatch):
    """On first use a kernel may go to a temporary folder; what is built ahead is wanted where it was asked for."""
    monkeypatch.setenv("QFLASH_CACHE_DIR", "/proc/qflash")
    result = invoke("build", "--arch", "90", "--kernel", "softmax")
    assert result.exit_code == 1
    assert result.output.startswith("Error: cannot write the compile cache /proc/qflash (")


def _qflash(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the engine reads QFLASH_CPU_ISA when it is loaded."""
    command = [sys.executable, "-m", "qflash.cli", *words]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)


@pytest.mark.process
def test_doctor_reports_an_unknown_instruction_set():
    done = _qflash("doctor", QFLASH_CPU_ISA="mmx")
    assert done.returncode == 1, done.stderr
    words = "QFLASH_CPU_ISA is 'mmx'; allowed: generic, avx2, avx512, amx"
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"CPU engine not usable: {words}" in rows
    assert rows[rows.index("Kernels") + 1].endswith(words) and rows[rows.index("Kernels") + 2].startswith(
        "cpu, cpu_int8"
    )
    assert rows[-1] == f"1 {words}"


@pytest.mark.process
def test_doctor_is_content_with_a_known_instruction_set():
    done = _qflash("doctor", QFLASH_CPU_ISA="generic")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU engine           generic" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS[:2], ids=lambda words: words[0])
def test_commands_refuse_an_unknown_instruction_set(command):
    done = _qflash(*command, QFLASH_CPU_ISA="mmx")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: QFLASH_CPU_ISA is 'mmx'; allowed: generic, avx2, avx512, amx")
    assert "Traceback" not in done.stderr
