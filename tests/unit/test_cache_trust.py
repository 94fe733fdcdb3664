"""The compile cache opens nothing that another user can have written: opening a library runs its constructors."""

from __future__ import annotations

import os
import shutil
import stat

import pytest

from qflash.errors import CacheError
from qflash.jit import load, toolchain
from qflash.jit.cache import Cache
from qflash.jit.compiler import LIBRARY, compile_unit, recipe
from qflash.jit.entry import FACTS

pytestmark = pytest.mark.process


@pytest.fixture
def entry(fake):
    """A compiled entry whose library leaves a mark when it is opened."""
    mark = (
        'extern "C" int creat(const char*, unsigned); '
        f'__attribute__((constructor)) void mark() {{ creat("{fake.directory}/opened", 0600); }}'
    )
    (fake.directory / "part.h").write_text(f"#define ANSWER 42\n{mark}\n")
    return compile_unit(fake.unit)


def _refused(fake, words: str) -> None:
    with pytest.raises(CacheError, match=words):
        load.load(fake.unit)
    assert not (fake.directory / "opened").exists()
    assert fake.runs() == 1


# Where in the cache: the root, the folder of entries, the entry, its library, its facts.
PLACES = ("", "kernels-1", "kernels-1/{key}", "kernels-1/{key}/" + LIBRARY, "kernels-1/{key}/" + FACTS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_refused(fake, entry, place, mode):
    path = Cache().root / place.format(key=entry.name)
    path.chmod(path.stat().st_mode | mode)
    _refused(fake, f"{path} has mode .*chmod go-w {path}.*QFLASH_CACHE_DIR")


@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_another_user_is_refused(fake, entry, give_away, place):
    give_away(Cache().root / place.format(key=entry.name))
    _refused(fake, "belongs to user .*QFLASH_CACHE_DIR")


@pytest.mark.parametrize("place", PLACES[1:])
def test_links_are_refused(fake, entry, place):
    path = Cache().root / place.format(key=entry.name)
    elsewhere = fake.directory / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    _refused(fake, f"{path} is .*link")


def test_a_root_that_is_a_link_is_judged_by_where_it_leads(fake, entry):
    root = Cache().root
    root.rename(fake.directory / "elsewhere")
    root.symlink_to(fake.directory / "elsewhere")
    assert load.load(fake.unit).answer() == 42
    assert fake.runs() == 1
    (fake.directory / "elsewhere").chmod(0o777)
    with pytest.raises(CacheError, match="has mode 0777"):
        load.load(fake.unit)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of root's")
def test_what_root_built_serves_other_users(fake, entry, monkeypatch):
    monkeypatch.setattr("qflash.jit.trust.os.geteuid", lambda: 54321)
    assert load.load(fake.unit).answer() == 42
    assert fake.runs() == 1


def test_what_was_checked_is_opened_though_the_root_is_swapped(fake, entry):
    cache = Cache()
    sound = (entry / LIBRARY).read_bytes()
    with cache.opened(*recipe(fake.unit, cache, toolchain.find(), None)) as found:
        cache.root.rename(fake.directory / "away")
        shutil.copytree(fake.directory / "away", cache.root)
        (entry / LIBRARY).write_bytes(b"someone else's")
        with open(f"{found.held}/{LIBRARY}", "rb") as opened:
            assert opened.read() == sound


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_directories_are_private_whatever_the_umask(fake, monkeypatch, umask):
    monkeypatch.setenv("QFLASH_CACHE_DIR", str(fake.directory / "new" / "cache"))
    before = os.umask(umask)
    try:
        entry = compile_unit(fake.unit)
        assert load.load(fake.unit).answer() == 42
    finally:
        os.umask(before)
    made = (fake.directory / "new", Cache().root, Cache().folder, entry)
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o022 for path in entry.iterdir())
    assert fake.runs() == 1


def test_a_root_that_others_may_write_is_refused_before_anything_is_compiled(fake):
    Cache().root.mkdir()
    Cache().root.chmod(0o777)
    with pytest.raises(CacheError, match="has mode 0777"):
        load.load(fake.unit)
    assert fake.runs() == 0
