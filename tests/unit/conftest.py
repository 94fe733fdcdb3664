"""The command line in this process; a fake nvcc and another user for tests of the compile cache."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qflash import cli
from qflash.jit import cache as caches
from qflash.jit import compiler, runtime, toolchain
from qflash.jit.compiler import Unit

# Answers --version and --dryrun, counts its runs, sleeps on demand, and makes a real shared library (or, with -c, an
# object) with the C++ compiler, linked with what it is told to.
FAKE_NVCC = """\
#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, V${FAKE_VERSION:-13.0.88}"; exit 0; fi
if [ "$1" = --dryrun ]; then echo '#$ LIBRARIES=  "-L'"$FAKE_LIBRARIES"'"' >&2; exit 0; fi
echo run >> "$FAKE_LOG"
sleep "${FAKE_SLEEP:-0}"
kind=-shared
kept=
while [ "$1" != -o ]; do
  case "$1" in
    -c) kind=-c ;;
    -D* | -L* | -l*) kept="$kept $1" ;;
    -cudart=static) kept="$kept -DFAKE_STATIC_RUNTIME" ;;
  esac
  shift
done
output="$2"
shift 2
case "$1" in
  *.o) exec g++ -shared -o "$output" "$@" $kept ;;
esac
grep -q BROKEN "$1" && { echo "error: broken source" >&2; exit 2; }
echo "ptxas info : Used 32 registers" >&2
exec g++ $kind -fPIC -o "$output" -x c++ "$1" $kept
"""


@pytest.fixture
def invoke():
    """invoke(words...): the `qflash` command, in this process."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli.main, arguments)

    return run


@pytest.fixture
def cache_dir(tmp_path, monkeypatch) -> Path:
    """Where QFLASH_CACHE_DIR points; nothing is there yet."""
    monkeypatch.setenv("QFLASH_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def fake_nvcc(tmp_path) -> Path:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def fake(tmp_path, monkeypatch, fake_nvcc):
    """A fake nvcc that is found, an empty cache, and a unit to compile. `runs()` counts compilations."""
    source = tmp_path / "launch.cu"
    source.write_text('#include "part.h"\nextern "C" int answer() { return ANSWER; }\n')
    (tmp_path / "part.h").write_text("#define ANSWER 42\n")
    log = tmp_path / "runs"
    monkeypatch.setenv("QFLASH_NVCC", str(fake_nvcc))
    monkeypatch.setenv("QFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("QFLASH_QUIET", "1")
    monkeypatch.setattr(caches.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("FAKE_LIBRARIES", str(tmp_path / "libraries"))
    toolchain.find.cache_clear()
    runtime.find.cache_clear()
    compiler.sources_digest.cache_clear()

    class Fake:
        unit = Unit("demo", source, (tmp_path,), (), "90a", "demo (test)")
        directory = tmp_path

        @staticmethod
        def runs() -> int:
            return len(log.read_text().splitlines()) if log.exists() else 0

        @staticmethod
        def script(then: str = "print(compile_unit(unit))") -> str:
            """Python source for another process, which has the same `unit`."""
            return textwrap.dedent(f"""
                from pathlib import Path
                from qflash.jit.compiler import Unit, compile_unit
                from qflash.jit.load import load
                here = Path({str(tmp_path)!r})
                unit = Unit("demo", here / "launch.cu", (here,), (), "90a", "demo (test)")
            """) + textwrap.dedent(then)

    yield Fake
    toolchain.find.cache_clear()


@pytest.fixture
def give_away(monkeypatch):
    """give_away(path): from now on the file or directory is another user's."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 54321, -1, follow_symlinks=False)
            return
        # Without privilege nothing can be given away: this process becomes another user in the eyes of the cache.
        mine = os.geteuid()
        monkeypatch.setattr("qflash.jit.trust.os.geteuid", lambda: mine + 1)

    return give
