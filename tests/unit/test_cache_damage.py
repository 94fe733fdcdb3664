"""Damaged entries of the compile cache: found before they are opened, and compiled again once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qflash.errors import CacheError
from qflash.jit import entry as entries
from qflash.jit import load
from qflash.jit.cache import Cache
from qflash.jit.compiler import LIBRARY, LOG, compile_unit
from qflash.jit.entry import FACTS

pytestmark = pytest.mark.process


def _cut(path: Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def _flip(path: Path) -> None:
    """One bit of the last byte: the size stays."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _without_sizes(path: Path) -> None:
    """As the first layout had it."""
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "files"}))


DAMAGES = {
    "library cut to a tenth": (lambda entry: _cut(entry / LIBRARY, 0.1), "kernel.so has [0-9]+ bytes, not"),
    "library cut to 90 %": (lambda entry: _cut(entry / LIBRARY, 0.9), "kernel.so has [0-9]+ bytes, not"),
    "library empty": (lambda entry: (entry / LIBRARY).write_bytes(b""), "kernel.so has 0 bytes, not"),
    "library changed": (lambda entry: _flip(entry / LIBRARY), "kernel.so has other contents"),
    "library gone": (lambda entry: (entry / LIBRARY).unlink(), "kernel.so is missing"),
    "facts gone": (lambda entry: (entry / FACTS).unlink(), "facts.json is missing"),
    "facts empty": (lambda entry: (entry / FACTS).write_text(""), "facts.json is not what"),
    "facts cut": (lambda entry: _cut(entry / FACTS, 0.5), "facts.json is not what"),
    "facts of no file": (lambda entry: (entry / FACTS).write_text('{"files": {}}'), "facts.json is not what"),
    "facts no object": (lambda entry: (entry / FACTS).write_text("[1]"), "facts.json is not what"),
    "facts without sizes": (lambda entry: _without_sizes(entry / FACTS), "facts.json is not what"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_entry_is_compiled_again_with_a_word(fake, capfd, name):
    damage, words = DAMAGES[name]
    entry = compile_unit(fake.unit)
    damage(entry)
    # In a process of its own: a library cut short would kill it.
    done = subprocess.run(
        [sys.executable, "-c", fake.script("print(load(unit).answer())")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"qflash: {entry} is damaged (") and line.endswith("; compiling it again")
    assert re.search(words, line)
    assert fake.runs() == 2
    assert load.load(fake.unit).answer() == 42 and fake.runs() == 2
    assert capfd.readouterr().err == ""


def test_two_processes_compile_a_damaged_entry_once(fake, monkeypatch):
    _cut(compile_unit(fake.unit) / LIBRARY, 0.9)
    monkeypatch.setenv("FAKE_SLEEP", "1")
    command = [sys.executable, "-c", fake.script("print(load(unit).answer())")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [out for out, _ in said] == ["42\n", "42\n"], said
    assert "".join(err for _, err in said).count("compiling it again") == 1
    assert fake.runs() == 2


def test_replacing_an_entry_leaves_the_old_files_to_those_who_have_them_open(fake):
    entry = compile_unit(fake.unit)
    library = load.load(fake.unit)
    before = (entry / LIBRARY).read_bytes()
    with (entry / LIBRARY).open("rb") as opened:
        (entry / FACTS).unlink()
        assert compile_unit(fake.unit) == entry and fake.runs() == 2
        assert os.fstat(opened.fileno()).st_ino != (entry / LIBRARY).stat().st_ino
        assert opened.read() == before
    assert library.answer() == 42
    assert [path.name for path in Cache().folder.iterdir() if path.name.startswith("building-")] == []


def test_damaged_entry_that_cannot_be_replaced_is_compiled_elsewhere(fake, monkeypatch, capfd):
    """A cache that an administrator filled, which others may read only."""
    entry = compile_unit(fake.unit)
    _flip(entry / LIBRARY)
    real = Cache._writable_folder

    def elsewhere(self):
        return real(Cache(fake.directory / f"qflash-{os.geteuid()}"))

    monkeypatch.setattr(Cache, "_writable_folder", elsewhere)
    rebuilt = compile_unit(fake.unit)
    assert rebuilt != entry and fake.runs() == 2
    assert f"{entry} is damaged" in capfd.readouterr().err
    assert compile_unit(fake.unit) == rebuilt and fake.runs() == 2
    assert capfd.readouterr().err == ""


def test_facts_tell_size_and_digest(fake):
    entry = compile_unit(fake.unit)
    data = (entry / LIBRARY).read_bytes()
    facts = json.loads((entry / FACTS).read_text())
    assert facts["label"] == "demo (test)" and facts["seconds"] >= 0
    assert set(facts["files"]) == {LIBRARY, LOG}
    assert facts["files"][LIBRARY] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_files_and_directory_are_on_disk_before_the_entry_appears(fake, monkeypatch):
    synced = []
    monkeypatch.setattr(
        entries.os, "fsync", lambda fd: synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
    )
    compile_unit(fake.unit)
    *files, directory = synced
    assert files == [LOG, LIBRARY, FACTS]
    assert directory.startswith("building-demo-sm_90a-")  # so the rename was still to come


def test_file_in_an_entrys_place_is_named(fake):
    entry = compile_unit(fake.unit)
    entry.rename(fake.directory / "away")
    entry.write_text("mine")
    with pytest.raises(CacheError, match=f"^{entry} is no directory"):
        load.load(fake.unit)
    assert entry.read_text() == "mine"


def test_directory_in_a_locks_place_is_named(fake):
    entry = compile_unit(fake.unit)
    entry.rename(fake.directory / "away")
    lock = entry.with_name(f"{entry.name}.lock")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(CacheError, match=f"^{lock} is a directory"):
        load.load(fake.unit)


@pytest.mark.parametrize("place", ["cache", "cache/kernels-1"])
def test_file_in_the_caches_place_is_named(fake, place):
    path = fake.directory / place
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(CacheError, match=f"^{path} is no directory"):
        load.load(fake.unit)
    assert fake.runs() == 0
