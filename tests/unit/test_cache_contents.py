"""What the compile cache counts and removes: its own, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from qflash.backends import cuda
from qflash.jit import layout, toolchain
from qflash.jit.cache import Cache
from qflash.jit.compiler import compile_unit, key_of


def _tree(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.process
def test_only_the_caches_own_is_removed(fake):
    entry = compile_unit(fake.unit)
    root, folder = Cache().root, Cache().folder
    (folder / f"building-{entry.name}-abc").mkdir()  # left by a process that died
    link = folder / entry.name.replace("demo", "linked")
    link.symlink_to(fake.directory)
    strays = [
        root / "Documents" / "thesis.txt",
        root / "other.lock",
        root / entry.name / "kernel.so",  # as an earlier layout had it
        folder / "Documents" / "thesis.txt",
        folder / "other.lock",
        folder / f"{entry.name}.bak" / "kernel.so",
        folder / f"building-{entry.name}" / "kernel.so",
        folder / f"{entry.name[:-1]}" / "kernel.so",
    ]
    for path in strays:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    info = Cache().info()
    assert info.entries == 1
    assert info.bytes == sum(file.stat().st_size for file in entry.iterdir())
    expected = {path.parent if path.parent not in (root, folder) else path for path in strays}
    assert set(info.strays) == {*expected, link}
    assert Cache().clear() == 1
    assert not entry.exists()
    assert {path.read_text() for path in strays} == {"precious"} and link.is_symlink()
    assert [path for path in folder.iterdir() if layout.recognise(path)] == []
    assert fake.unit.source.exists()


@pytest.mark.process
def test_things_of_the_wrong_kind_are_left_alone(fake):
    entry = compile_unit(fake.unit)
    folder = Cache().folder
    file = folder / entry.name.replace("demo", "file")
    file.write_text("precious")
    directory = folder / f"{file.name}.lock"
    directory.mkdir()
    assert set(Cache().info().strays) == {file, directory}
    assert Cache().clear() == 1
    assert _tree(folder) == sorted([file.name, directory.name])


@pytest.mark.process
def test_an_entry_that_is_being_built_survives_clear(fake, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "2")
    process = subprocess.Popen([sys.executable, "-c", fake.script()], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while fake.runs() == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert Cache().clear() == 0
    assert process.wait(timeout=60) == 0
    assert Cache().info().entries == 1 and fake.runs() == 1


def test_empty_and_missing_caches_hold_nothing(fake):
    assert (Cache().info().entries, Cache().info().bytes, Cache().info().strays, Cache().clear()) == (0, 0, (), 0)
    assert not Cache().root.exists()


@pytest.mark.parametrize("asked", ["", "75"])
def test_every_key_has_the_form_that_is_recognised(fake, monkeypatch, asked):
    monkeypatch.setenv("QFLASH_CUDA_ARCH", asked)
    cuda.asked.cache_clear()
    try:
        units = cuda.specialisations((75, 90))
    finally:
        monkeypatch.undo()
        cuda.asked.cache_clear()
    tools = toolchain.Toolchain("nvcc", "test", "13.0.88")
    for unit in units:
        path = fake.directory / key_of(unit, tools)
        path.mkdir()
        assert layout.recognise(path) == layout.Own(path, path.name, "entry")
