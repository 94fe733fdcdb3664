"""Linear layers of bfloat16 in AMX tiles, on processors without: tile instructions are software (amx/tiles.h)."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qflash import _native
from qflash.call.spec import ACTIVATIONS, OP_DTYPES
from qflash.testing import emulator
from qflash.testing.guarded import guarded
from qflash.testing.linear_problems import LinearProblem, linear, operands

HERE = Path(__file__).parent
CPU = HERE.parent.parent / "qflash" / "csrc" / "cpu"
WORDS = "avx512f avx512bw avx512vl avx512dq avx512bf16 amx-tile amx-bf16"
GUARD = 256

pytestmark = pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text() or _native.cpu_isa() not in ("avx512", "amx"),
    reason="beside the tiles, the kernel's own instructions are AVX-512 with BF16, which this machine lacks",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    built = tmp_path_factory.mktemp("amx") / "linear.so"
    flags = ["-shared", "-fPIC", "-std=c++17", "-O2", "-fno-exceptions", "-fno-math-errno", "-DQF_ISA=amx_bf16"]
    flags += ["-mavx2", "-mfma", "-mf16c", *(f"-m{word}" for word in WORDS.split())]
    flags += [f"-I{folder}" for folder in (HERE / "amx", CPU, CPU.parent / "include")]
    flags += ["-include", str(HERE / "amx" / "tiles.h")]
    command = [emulator.compiler()[0], *flags, str(HERE / "amx" / "linear.cc"), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = ctypes.CDLL(str(built))
    found.try_scratch_bytes.restype = ctypes.c_int64
    return found


def strides(x: np.ndarray, names: tuple[str, str]) -> dict[str, int]:
    return {name: stride // x.itemsize for name, stride in zip(names, x.strides, strict=True)}


def run(library, case: LinearProblem, arrays, block: tuple[int, int, int, int] | None = None) -> np.ndarray:
    """out, of which `block`, (row, column, rows, columns), is computed."""
    out = guarded(np.full((case.m, case.n), 7.0, np.float32), case.n * 4, True)
    fields = {name: arrays[name] for name in arrays if name != "residual"}
    fields |= strides(arrays["x"], ("x_stride_m", "x_stride_k")) | strides(arrays["w"], ("w_stride_k", "w_stride_n"))
    if case.gated:
        fields |= strides(arrays["up"], ("up_stride_k", "up_stride_n"))
    fields |= {"m": case.m, "n": case.n, "k": case.k, "out": out, "out_stride_m": case.n, "num_threads": 1}
    fields |= {"dtype": OP_DTYPES.index("bfloat16"), "out_dtype": OP_DTYPES.index("float32")}
    fields |= {"activation": ACTIVATIONS.index(case.activation), "bias_dtype": OP_DTYPES.index("float32")}
    params = emulator.packed("QfLinearParams", fields)
    row, column, rows, columns = block or (0, 0, case.m, case.n)
    size = library.try_scratch_bytes(rows, columns, 2 if case.gated else 1)
    scratch = emulator.poisoned(size + GUARD)
    where = (ctypes.c_int64(row), ctypes.c_int64(column), rows, columns)
    assert library.try_block(params, None, *where, ctypes.c_void_p(scratch.ctypes.data)) == 0
    assert (scratch[size:] == 0xFF).all()
    return out


BASE = LinearProblem(70, 90, 300, "bfloat16", out_dtype="float32", bias="float32", at_end=True)


@pytest.mark.parametrize("m", [1, 15, 16, 17, 31, 32, 33, 48, 63, 384])
@pytest.mark.parametrize("n", [1, 16, 17, 48, 64, 65, 256])
def test_rows_and_columns_of_part_of_a_tile(library, m, n):
    check(library, replace(BASE, m=m, n=n, k=70))


@pytest.mark.parametrize("k", [0, 1, 2, 31, 32, 33, 255, 256, 257, 600])
@pytest.mark.parametrize("x_layout", ["k", "m"])
@pytest.mark.parametrize("w_layout", ["k", "n"])
def test_every_length_and_layout_of_k(library, k, x_layout, w_layout):
    for m, n in ((33, 65), (50, 100)):
        check(library, replace(BASE, m=m, n=n, k=k, x_layout=x_layout, w_layout=w_layout, gaps=(3, 5)))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_what_follows_the_products(library, activation):
    check(library, replace(BASE, activation=activation))


def test_sums_of_integers_are_exact(library):
    case = replace(BASE, integers=True, k=500)
    arrays = operands(case)
    np.testing.assert_array_equal(run(library, case, arrays), linear(case, arrays)[0]["out"])


def test_the_bits_of_a_row_depend_on_no_other(library):
    arrays = operands(BASE)
    whole = run(library, BASE, arrays)
    for block in ((0, 0, 1, 90), (3, 0, 16, 64), (16, 64, 37, 26), (69, 64, 1, 1)):
        row, column, rows, columns = block
        found = run(library, BASE, arrays, block)
        there = np.s_[row : row + rows, column : column + columns]
        np.testing.assert_array_equal(found[there], whole[there])
        found[there] = 7.0
        assert (found == 7.0).all()


def test_what_is_not_finite_stays_in_its_row_and_column(library):
    arrays = operands(BASE)
    clean = run(library, BASE, arrays)
    arrays["x"][40, 299], arrays["w"][0, 33] = np.nan, np.inf
    found = run(library, BASE, arrays)
    reached = np.zeros(found.shape, bool)
    reached[40] = reached[:, 33] = True
    assert not np.isfinite(found[reached]).any()
    np.testing.assert_array_equal(found[~reached], clean[~reached])


def check(library, case: LinearProblem) -> None:
    arrays = operands(case)
    want, bound = linear(case, arrays)
    off = np.abs(run(library, case, arrays) - want["out"])
    assert (off <= bound["out"]).all(), (off / bound["out"]).max()
