"""tools/install.py: a change of any file that the native module is made of builds it again, and nothing else does."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NATIVE = [name for name in load().sources() if name != "pyproject.toml"]
# One file of each suffix: what a list of suffixes would have to name.
OF_EACH_SUFFIX = list({Path(name).suffix: name for name in NATIVE}.values())


@pytest.fixture
def install(tmp_path, monkeypatch) -> ModuleType:
    """The script on a copy of the native sources, as if a module had been built from them."""
    module = load()
    for name in (*module.SOURCES, "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    native = tmp_path / "qflash" / "_native.so"
    native.write_bytes(b"built")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RECORD", tmp_path / "build" / "native.json")
    monkeypatch.setattr(module, "imported", lambda: (tmp_path / "qflash" / "__init__.py", native))
    monkeypatch.setattr(module, "install_editable", lambda: None)
    monkeypatch.setattr(module, "build_in_place", lambda: None)
    module.build()
    assert module.outdated() is None
    return module


def test_to_look_for_pip_leaves_distutils_to_setuptools():
    """A finder of setuptools would take it for a sign that pip runs; torch.compile needs setuptools afterwards."""
    before = [dict(vars(finder)) for finder in sys.meta_path]
    load().has("pip")
    assert [dict(vars(finder)) for finder in sys.meta_path] == before


def test_suffixes_are_not_headers_and_sources_alone():
    assert {Path(name).suffix for name in OF_EACH_SUFFIX} >= {".cc", ".h", ".inl", ".map", ".txt"}


@pytest.mark.parametrize("name", OF_EACH_SUFFIX)
def test_a_changed_source_is_built_again(install, name):
    path = install.ROOT / name
    before = path.read_bytes()
    times = path.stat().st_mtime_ns
    path.write_bytes(before + b"\n")
    os.utime(path, ns=(times, times))  # as a copy that keeps times leaves it
    assert install.outdated() == f"{name} changed"
    path.write_bytes(before)
    assert install.outdated() is None


def test_sources_that_come_and_go_are_built_again(install):
    new = install.ROOT / "qflash" / "csrc" / "cpu" / "ops" / "new.tile"
    new.write_text("")
    assert install.outdated() == "qflash/csrc/cpu/ops/new.tile changed"
    (install.ROOT / "qflash" / "csrc" / "cpu" / "isa.cc").unlink()
    assert install.outdated() == "qflash/csrc/cpu/isa.cc and 1 more files changed"


def test_what_changed_is_newer_than_its_object_when_it_is_built(install):
    """ninja compares times, and a source that came from elsewhere may be older than what was made of it."""
    path = install.ROOT / "qflash" / "csrc" / "cpu" / "backward_tile.inl"
    other = path.with_name("isa.cc")
    path.write_text("changed")
    for each in (path, other):
        os.utime(each, (1, 1))
    install.build()
    assert path.stat().st_mtime > 1 and other.stat().st_mtime == 1
    assert install.outdated() is None


def test_another_module_than_the_one_built_is_built_again(install):
    (install.ROOT / "qflash" / "_native.so").write_bytes(b"built by somebody else")
    assert "not known what the installed module was built from" in install.outdated()


@pytest.mark.parametrize(("text", "matters"), [("[tool.other]\nx = 1\n", False), ('[project.urls]\nx = "y"\n', True)])
def test_settings_of_other_tools_do_not_matter(install, text, matters):
    path = install.ROOT / "pyproject.toml"
    path.write_text(path.read_text() + text)
    assert (install.outdated() == "pyproject.toml changed") is matters


def test_a_module_in_the_source_tree_is_of_no_use_without_the_path(install, monkeypatch):
    monkeypatch.setattr(install, "has", lambda module: module != "scikit_build_core")
    monkeypatch.setattr(install, "imported", lambda: "ModuleNotFoundError: No module named 'qflash'")
    with pytest.raises(SystemExit, match=rf"No module named 'qflash'\n.*: set PYTHONPATH={install.ROOT}$"):
        install.main()


def test_an_editable_install_leaves_other_interpreters_their_modules(tmp_path, monkeypatch):
    module, folder = load(), tmp_path / "qflash"
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "run", lambda command: None)
    folder.mkdir()
    ours, theirs = folder / f"_native{EXTENSION_SUFFIXES[0]}", folder / "_native.cpython-399-x86_64-linux-gnu.so"
    for path in (ours, theirs):
        path.touch()
    module.install_editable()
    assert list(folder.iterdir()) == [theirs]


def test_every_file_that_is_included_counts():
    """What a source of the module includes lies in the folders whose files are compared."""
    folders = [ROOT / "qflash" / "csrc" / folder for folder in ("", "cpu", "include")]
    for name in NATIVE:
        for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', (ROOT / name).read_text(), re.MULTILINE):
            places = [place / included for place in ((ROOT / name).parent, *folders)]
            found = [place.resolve().relative_to(ROOT).as_posix() for place in places if place.is_file()]
            assert included.startswith("xla/") or found[0] in NATIVE, f"{name} includes {included}"
