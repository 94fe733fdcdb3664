"""The profiling binaries (`make KERNEL=...`): they build, refuse bad flags, and their check tells right from wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qflash.backends import cuda
from qflash.dispatch import BY_NAME, kernels_of
from qflash.errors import ToolchainError
from qflash.jit import toolchain

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).parent / "standalone"


def why_not() -> str | None:
    for tool in ("make", "g++"):
        if shutil.which(tool) is None:
            return f"no {tool} on the PATH"
    try:
        toolchain.find()
    except ToolchainError as error:
        return str(error).splitlines()[0]
    return None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"compile test: {why_not()}")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A folder where `make` leaves its objects and binaries: the checkout's own stay as they are."""
    folder = tmp_path_factory.mktemp("standalone")
    for name in ("Makefile", "standalone.mk", "qflash"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def make(tree: Path, *words: str) -> subprocess.CompletedProcess:
    tools = toolchain.find()
    flags = " ".join(f"-L{directory}" for directory in tools.library_dirs)
    command = ["make", "-j2", f"NVCC={tools.nvcc}", f"NVCC_FLAGS={flags}", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def binary(tree) -> Path:
    done = make(tree, "KERNEL=fa", "NVCC_ARCH=80", "HEAD_DIM=32")
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "bin" / "profile_fa"


def run(binary: Path, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([binary, *flags], cwd=binary.parent, capture_output=True, text=True)


def test_help_tells_what_it_was_built_for(binary):
    done = run(binary, "--help")
    assert done.returncode == 0
    for word in ("'fa'", "float16", "head_dim up to 32", "sm_80", "--warmup=N", "--runs=N", "--random", "--causal"):
        assert word in done.stdout, word


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--nonsense", "'--nonsense' is no flag"),
        ("--runs", "lacks its =value"),
        ("--runs=many", "--runs is 'many'; allowed: an integer, 0 or more"),
        ("--batch=0", "--batch is '0'; allowed: an integer, 1 or more"),
        ("--kv-heads=3", "--kv-heads is 3; allowed: a divisor of --heads, 16"),
        ("--head-dim=33", "--head-dim is 33; allowed: 1 to 32"),
        ("--dtype=float32", "--dtype is 'float32'; allowed: float16"),
    ],
)
def test_bad_flags_are_refused(binary, flag, words):
    done = run(binary, flag)
    assert done.returncode == 2
    assert words in done.stderr


def test_without_a_gpu_it_says_so(binary):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # a machine with a GPU has none either then
    done = subprocess.run([binary], env=environment, cwd=binary.parent, capture_output=True, text=True)
    assert done.returncode == 3
    assert "no CUDA device" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [(), ("--random", "--causal", "--length=777", "--keys=900", "--kv-heads=4")])
def test_it_agrees_and_times(binary, flags):
    done = run(binary, "--warmup=1", "--runs=2", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agrees with the CPU engine" in done.stdout
    assert "TFLOP/s" in done.stdout


def test_another_specialisation_rebuilds_and_the_same_does_not(tree, binary):
    """The binary depends on a file that holds its command."""
    command, words = "build/standalone/fa.command", ("KERNEL=fa", "NVCC_ARCH=80", "HEAD_DIM=32")
    before = (tree / command).stat().st_mtime_ns
    make(tree, command, *words)
    assert (tree / command).stat().st_mtime_ns == before < binary.stat().st_mtime_ns
    make(tree, command, *words, "DTYPE=float32")
    assert (tree / command).stat().st_mtime_ns > before


ALSO = {"QF_PLAIN_SCORES"}  # without it a kernel serves all scores


@pytest.mark.parametrize("kernel", [row.name for row in kernels_of("attention", "cuda") if row.backend == "cuda"])
def test_a_binary_is_told_what_a_library_of_its_kernel_is(tree, kernel):
    arch = max(BY_NAME[kernel].min_arch, 80)
    unit = cuda.unit(BY_NAME[kernel], cuda.specs(BY_NAME[kernel], arch)[0])
    said = make(tree, "--dry-run", f"KERNEL={kernel}", f"NVCC_ARCH={arch}").stdout
    assert [name for name, _ in unit.defines if f"-D{name}=" not in said and name not in ALSO] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["KERNEL=nonsense"], "KERNEL is 'nonsense'; allowed: decode fa"),
        (["KERNEL=fa", "DTYPE=int4"], "DTYPE is 'int4'; allowed: float32, float16, bfloat16"),
        (["KERNEL=fa", "HEAD_DIM=100"], "HEAD_DIM is '100'; allowed: 32, 64"),
        (["KERNEL=fa", "HEAD_DIM="], "HEAD_DIM is ''; allowed: 32, 64"),
        (["KERNEL=fa", "NVCC_ARCH=seventy"], "NVCC_ARCH is 'seventy'; allowed: a compute capability times ten"),
        (["KERNEL=fa", "NVCC_ARCH=70"], "NVCC_ARCH is '70'; allowed: 75 or more"),
        (["KERNEL=fa_mma", "DTYPE=float32"], "DTYPE is 'float32'; allowed: float16, bfloat16, as fa_mma"),
        (["KERNEL=fa_tc", "DTYPE=bfloat16", "NVCC_ARCH=75"], "DTYPE is 'bfloat16'; allowed: float16, as"),
        (["KERNEL=sm90_fwd", "NVCC_ARCH=80"], "NVCC_ARCH is '80'; allowed: 90, as sm90_fwd is for Hopper alone"),
    ],
)
def test_make_refuses_what_it_cannot_build(tree, words, message):
    done = make(tree, *words)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.fixture(scope="module")
def checker(tree, binary) -> Path:
    """tests/compile/standalone/check.cu beside the engine's objects."""
    tools = toolchain.find()
    output = tree / "check"
    csrc = ROOT / "qflash" / "csrc"
    command = [tools.nvcc, "-std=c++17", "-cudart=static", f"-I{csrc}", f"-I{csrc / 'include'}"]
    command += ["-DQF_HEAD_DIM=32", "-DQF_DTYPE=1", "-DQF_ARCH=80", *(f"-L{place}" for place in tools.library_dirs)]
    command += [HERE / "check.cu", *sorted((tree / "build" / "standalone").glob("*.o")), "-lpthread", "-o", output]
    subprocess.run(command, check=True)
    return output


def test_the_check_can_fail(checker):
    assert run(checker).returncode == 0
    for harm in ("damage", "lost"):
        done = run(checker, harm)
        assert done.returncode == 1, harm
        assert "MISMATCH" in done.stdout


def test_the_reference_is_kept_and_a_damaged_one_is_not_believed(checker):
    shutil.rmtree(checker.parent / ".cache", ignore_errors=True)
    assert "computing" in run(checker).stdout
    (kept,) = (checker.parent / ".cache").iterdir()
    assert "computing" not in run(checker).stdout
    kept.write_bytes(kept.read_bytes()[:-4])
    done = run(checker)
    assert "computing" in done.stdout
    assert done.returncode == 0
