"""`qflash cache`: what it shows, what it removes, and what it leaves alone."""

from __future__ import annotations

import pytest

from qflash.jit.compiler import compile_unit
from qflash.jit.lock import locked

KEY = "fa-sm_80-0123456789abcdef01234567"


@pytest.fixture
def filled(cache_dir):
    """A cache with an entry of one MiB."""
    entry = cache_dir / "kernels-1" / KEY
    for directory in (cache_dir, entry.parent, entry):
        directory.mkdir(mode=0o700)
    (entry / "kernel.so").write_bytes(bytes(1 << 20))
    return cache_dir


def test_cache_is_shown_and_cleared(invoke, filled):
    assert invoke("cache").output == f"{filled}: 1 entries, 1.0 MiB\n"
    assert invoke("cache", "--clear").output.splitlines() == [
        f"removing 1 entries, 1.0 MiB from {filled / 'kernels-1'}",
        "removed 1 entries, 1.0 MiB",
        f"{filled}: 0 entries, 0.0 MiB",
    ]
    assert list(filled.rglob("*")) == [filled / "kernels-1"]


def test_clear_leaves_what_is_not_the_caches_and_says_so(invoke, filled):
    """QFLASH_CACHE_DIR may be anyone's home."""
    (filled / "Documents").mkdir()
    (filled / "Documents" / "thesis.txt").write_text("precious")
    (filled / "apt.lock").write_text("precious")
    result = invoke("cache", "--clear")
    assert result.exit_code == 0, result.output
    assert "removed 1 entries" in result.output
    assert f"left alone: {filled / 'Documents'}, {filled / 'apt.lock'}" in result.output
    assert (filled / "Documents" / "thesis.txt").read_text() == (filled / "apt.lock").read_text() == "precious"


def test_clear_says_what_stays(invoke, filled):
    with locked(filled / "kernels-1", KEY):  # as if another process were building it
        result = invoke("cache", "--clear")
    assert "removed 0 entries, 0.0 MiB" in result.output
    assert "1 entries stay: they are being built" in result.output


def test_many_strays_are_not_all_listed(invoke, filled):
    for number in range(11):
        (filled / f"file{number:02}").touch()
    assert "file07 and 3 more" in invoke("cache").output


@pytest.mark.parametrize("command", [["cache"], ["cache", "--clear"]])
def test_cache_that_others_may_write_is_refused(invoke, filled, command):
    filled.chmod(0o777)
    result = invoke(*command)
    assert result.exit_code == 1
    assert f"Error: {filled} has mode 0777" in result.output
    assert (filled / "kernels-1" / KEY).exists()


@pytest.mark.process
def test_doctor_counts_the_same(invoke, fake):
    entry = compile_unit(fake.unit)
    size = sum(file.stat().st_size for file in entry.iterdir())
    assert f"1 entries, {size / 2**20:.1f} MiB" in invoke("doctor").output
