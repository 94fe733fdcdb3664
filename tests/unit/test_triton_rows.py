"""Rows of KERNELS that are written in Triton: when they run, what they say without Triton, how sizes are computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import qflash
from qflash import dispatch, machine
from qflash.backends import triton as backend
from qflash.call.spec import Spec
from qflash.cli.usable import usable_kernels
from qflash.triton.launches import Choice, Launches, Region, constant, parameters_of, size, vectors

ROWS = [row for row in dispatch.KERNELS if row.backend == "triton"]
FIELDS = {"rows": 10, "columns": 7, "x": 4096 + 8}


def test_they_run_only_by_name():
    assert ROWS
    for row in ROWS:
        assert not row.automatic and row.device == "cuda" and row.page == "triton"
        assert (Path(qflash.__file__).parent / "triton" / f"{row.name}.py").is_file()


@pytest.mark.process
def test_importing_qflash_and_its_backends_does_not_import_triton():
    script = "import sys, qflash, qflash.backends.triton, qflash.cli.usable; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_without_the_package_they_name_it(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    spec = Spec("cuda", 90, "float16", op="softmax")
    backend.entry.cache_clear()
    with pytest.raises(
        qflash.ToolchainError, match=r"'triton_softmax' is written in Triton, and the package triton is"
    ):
        backend.entry(dispatch.BY_NAME["triton_softmax"], spec)
    monkeypatch.setattr(machine, "gpus", lambda: ((machine.Gpu("a GPU", 90, 1, "1"),), ""))
    assert "pip install 'qflash[triton]'" in usable_kernels()["triton_fwd"].why_not
    monkeypatch.setattr(backend, "find_spec", lambda name: name)
    assert usable_kernels()["triton_fwd"].why_not == ""


@pytest.mark.parametrize("arch", [75, 70])
def test_they_refuse_gpus_before_ampere(arch):
    for row in ROWS:
        spec = dispatch.VARIANTS[row.name].spec(arch, row.dtypes[0], 64)
        assert f"needs compute capability 8.0, this GPU has {arch / 10}" in dispatch.reasons(row, spec)


def test_decoding_refuses_what_it_would_rotate_at_every_step():
    row = dispatch.BY_NAME["triton_decode"]
    spec = Spec("cuda", 90, "float16", 64, rope="half", few_rows=True)
    assert ["takes no rope with arrays" in reason for reason in dispatch.reasons(row, spec)] == [True]
    assert dispatch.reasons(row, Spec("cuda", 90, "float16", 64, rope="half", few_rows=True, kv="pages")) == []


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (size("rows") * 3 + 2, 32),
        (size("rows").ceil_div(size("columns")), 2),
        (size("rows").ceil_div(5), 2),
        (constant(0).at_least(1) * size("columns"), 7),
        (size("rows").up_to(10), 1),
        (size("rows").up_to(9), 0),
        (size("x").multiple_of(8), 1),
        (size("x").multiple_of(16), 0),
    ],
)
def test_sizes(number, value):
    assert number.value(FIELDS) == value


def test_regions_begin_at_whole_vectors():
    regions = (Region("bytes", "i8", size("rows")), Region("floats", "fp32", size("columns")))
    launches = Launches("QfRowsParams", {}, (Choice(()),), regions)
    offsets = {name: offset.value(FIELDS) for name, offset in launches.offsets().items()}
    assert offsets == {"bytes": 0, "floats": 256, "": 512}
    assert launches.type_of("floats", launches.choices[0]) == "*fp32"


def test_parameters_have_the_names_of_fields():
    names = parameters_of("QfAttnParams")
    assert names["kv_k"] == "kv.k.data" and names["kv_k_stride_t"] == "kv.k.stride_t" and names["lse"] == "lse"
    launches = Launches("QfAttnParams", {"q": "fp16"}, (Choice((), (), vectors("float16", "q")),))
    names, choice = ("q", "q_stride_b", "q_len", "scale", "has_lse"), launches.choices[0]
    assert [launches.type_of(name, choice) for name in names] == ["*fp16", "i64", "i32", "fp32", "i32"]
    assert launches.type_of("q", Choice((), types={"q": "fp32"})) == "*fp32"
    conditions = [one.code for one in launches.conditions(launches.choices[0])]
    assert conditions == [
        (("field", f"q.{name}"), ("constant", number), ("multiple_of", 0))
        for name, number in (("data", 16), ("stride_b", 8), ("stride_t", 8), ("stride_h", 8))
    ]
