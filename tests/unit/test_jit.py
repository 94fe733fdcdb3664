"""The compile cache and the compiler search, with a fake nvcc: what happens when things go wrong."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from qflash.errors import CacheError, CompileError, KernelError, ToolchainError
from qflash.jit import cache as caches
from qflash.jit import load, prebuild, toolchain
from qflash.jit.cache import Cache
from qflash.jit.compiler import LOG, Unit, compile_unit, key_of

pytestmark = pytest.mark.process


def test_compiles_once_and_loads(fake):
    first = load.load(fake.unit)
    assert first.answer() == 42
    assert load.load(fake.unit).answer() == 42
    assert fake.runs() == 1
    entry = compile_unit(fake.unit)
    assert "registers" in (entry / LOG).read_text()
    assert load.address(first, "answer") != 0
    with pytest.raises(KernelError, match="no function missing"):
        load.address(first, "missing")


def test_key_covers_included_files(fake):
    from qflash.jit import compiler

    before = key_of(fake.unit, toolchain.find())
    (fake.directory / "part.h").write_text("#define ANSWER 43\n")
    compiler.sources_digest.cache_clear()  # a process reads its sources once
    assert key_of(fake.unit, toolchain.find()) != before


def test_says_what_it_compiles(fake, monkeypatch, capfd):
    monkeypatch.delenv("QFLASH_QUIET")
    compile_unit(fake.unit)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("qflash: compiling demo (test) for sm_90a with nvcc 13.0, usually ")
    assert lines[1].startswith("qflash: compiled demo (test) in ")


def test_says_which_of_how_many_it_compiles(fake, monkeypatch, capfd):
    """Of several libraries, those that are there already do not count."""
    units = [replace(fake.unit, defines=(("N", str(n)),), label=f"demo {n}") for n in range(3)]
    compile_unit(units[1])
    monkeypatch.delenv("QFLASH_QUIET")
    prebuild.prebuild(units, workers=1)
    lines = [line for line in capfd.readouterr().err.splitlines() if "compiling" in line]
    assert [line.split(" for ")[0] for line in lines] == [
        "qflash: compiling 1 of 2, demo 0",
        "qflash: compiling 2 of 2, demo 2",
    ]


def test_says_how_many_parts_of_a_library_are_done(fake, monkeypatch, capfd):
    monkeypatch.delenv("QFLASH_QUIET")
    fake.unit.source.write_text('#if QF_PART == 0\nextern "C" int answer() { return 42; }\n#endif\n')
    assert load.load(replace(fake.unit, parts=3)).answer() == 42
    lines = capfd.readouterr().err.splitlines()
    assert lines[1:3] == [f"qflash: compiled {n} of 3 parts of demo (test)" for n in (1, 2)]
    assert lines[3].startswith("qflash: compiled demo (test) in ")


def test_failed_compilation_leaves_no_entry(fake):
    fake.unit.source.write_text("BROKEN\n")
    from qflash.jit import compiler

    compiler.sources_digest.cache_clear()
    with pytest.raises(CompileError, match="error: broken source"):
        compile_unit(fake.unit)
    assert Cache().info().entries == 0


def test_killed_compilation_leaves_the_cache_sound(fake, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "60")
    process = subprocess.Popen([sys.executable, "-c", fake.script()], start_new_session=True)
    deadline = time.monotonic() + 30
    while fake.runs() == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert fake.runs() == 1 and Cache().info().entries == 0
    monkeypatch.setenv("FAKE_SLEEP", "0")
    assert load.load(fake.unit).answer() == 42
    leftovers = [path for path in Cache().folder.iterdir() if path.name.startswith("building-")]
    assert leftovers == []


def test_two_processes_compile_once(fake, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "1")
    both = [
        subprocess.Popen([sys.executable, "-c", fake.script()], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1] and fake.runs() == 1


def test_sound_library_that_does_not_open_is_compiled_once_more(fake):
    (fake.directory / "part.h").write_text("#define ANSWER missing_function()\nextern int missing_function();\n")
    with pytest.raises(OSError, match=f"^{compile_unit(fake.unit)}.*missing_function"):
        load.load(fake.unit)
    assert fake.runs() == 2


def test_read_only_cache_serves_what_it_has(fake):
    compile_unit(fake.unit)
    _refuse_writes(Cache())
    try:
        assert load.load(fake.unit).answer() == 42
        assert fake.runs() == 1
    finally:
        _allow_writes(Cache())


def test_read_only_cache_falls_back_to_a_private_directory(fake, monkeypatch, capfd):
    cache = Cache()
    cache.folder.mkdir(parents=True, mode=0o700)
    cache.root.chmod(0o700)
    _refuse_writes(cache)
    real = caches.tempfile.TemporaryFile

    def refuse(*args, dir=None, **kwargs):  # the superuser may write anywhere, so permission bits do not stop it
        if Path(dir) == cache.folder:
            raise PermissionError(13, "Permission denied")
        return real(*args, dir=dir, **kwargs)

    monkeypatch.setattr(caches.tempfile, "TemporaryFile", refuse)
    caches._warn_once.cache_clear()
    try:
        entry = compile_unit(fake.unit)
    finally:
        _allow_writes(cache)
    private = fake.directory / f"qflash-{os.geteuid()}"
    assert entry.parent.parent == private
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert f"cannot write the compile cache {cache.root}" in capfd.readouterr().err
    assert compile_unit(fake.unit) == entry and fake.runs() == 1
    with pytest.raises(CacheError, match=f"cannot write the compile cache {cache.root}"):
        cache.require_writable()


def test_private_directory_of_someone_else_is_refused(fake):
    private = fake.directory / f"qflash-{os.geteuid()}"
    private.mkdir()
    private.chmod(0o777)
    with pytest.raises(CacheError, match="QFLASH_CACHE_DIR"):
        caches._private_root(create=True)
    assert caches._private_root(create=False) is None  # whoever made it cannot keep others from their own cache


def test_prebuild_reports_progress_and_keeps_order(fake):
    units = [Unit("demo", fake.unit.source, (fake.directory,), (("N", str(n)),), "80", f"demo {n}") for n in range(3)]
    seen = []
    entries = prebuild.prebuild(units, workers=2, progress=lambda unit, done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [entry.name for entry in entries] == [key_of(unit, toolchain.find()) for unit in units]
    assert Cache().info().entries == 3
    assert Cache().clear() == 3 and Cache().info().entries == 0


def test_missing_compiler_says_what_to_install(fake, monkeypatch):
    monkeypatch.setenv("QFLASH_NVCC", str(fake.directory / "nowhere"))
    toolchain.find.cache_clear()
    with pytest.raises(ToolchainError, match=r"pip install 'qflash\[cuda\]'") as caught:
        compile_unit(fake.unit)
    assert "nowhere is not there" in str(caught.value)


def test_compiler_from_wheels_is_found(fake, fake_nvcc, monkeypatch):
    home = fake.directory / "site" / "nvidia" / "cu13"
    (home / "bin").mkdir(parents=True)
    fake_nvcc.rename(home / "bin" / "nvcc")
    monkeypatch.delenv("QFLASH_NVCC")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None if name == "nvcc" else f"/usr/bin/{name}")
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(fake.directory / "site"))
    is_file = os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda path: is_file(path) and "/usr/local/cuda" not in str(path))
    toolchain.find.cache_clear()
    found = toolchain.find()
    assert found.origin == "PyPI" and found.library_dirs == (str(home / "lib"),) and found.version == "13.0.88"


def _refuse_writes(cache: Cache) -> None:
    cache.root.chmod(0o555)
    cache.folder.chmod(0o555)


def _allow_writes(cache: Cache) -> None:
    cache.root.chmod(0o700)
    cache.folder.chmod(0o700)
