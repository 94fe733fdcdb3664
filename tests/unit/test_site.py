"""The site of the documentation: its pages come from the repository, and a dead link or heading is an error.

`make test` builds the site as it is; here it is built with faults."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocs_awesome_nav", reason="the extra `docs` is not installed")
ROOT = Path(__file__).resolve().parents[2]


def load_hook():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools" / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hook = load_hook()


# Page, what is added to it, what MkDocs must say.
DEAD = (
    ("README.md", "[gone](docs/guide/gone.md)", "guide/gone.md"),
    ("README.md", "[heading](docs/numerics.md#gone)", "does not contain an anchor '#gone'"),
    ("docs/glossary.md", "[source](../qflash/gone.py)", "gone.py"),
    ("docs/glossary.md", "![picture](gone.svg)", "gone.svg"),
)


@pytest.fixture
def copy(tmp_path):
    """What the site is made of."""
    for folder in ("docs", "bench", "profiles", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("README.md", "ARCHITECTURE.md", "mkdocs.yml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("qflash", "tests", "examples", "standalone.mk"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.process
def test_the_site_has_every_page_and_dead_links_are_the_only_warnings(copy):
    for page, text, _ in DEAD:
        (copy / page).write_text(f"{(copy / page).read_text()}\n{text}\n")
    command = [sys.executable, str(copy / "tools" / "site.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == len(DEAD), done.stderr
    assert [complaint for _, _, complaint in DEAD if complaint not in done.stderr] == []

    site = copy / "build" / "site"
    home = (site / "index.html").read_text()
    assert 'src="bench/results/nvidia-h200/sm90.svg"' in home
    assert (site / "bench" / "results" / "nvidia-h200" / "sm90.svg").exists()
    assert 'href="architecture.html#how-to-add-a-kernel"' in home
    assert "qflash:results" not in home


def test_links_lead_to_pages_pictures_and_sources(monkeypatch):
    def link(text, path="docs/kernels/fa.md"):
        return hook.for_site(text, path)

    assert link("[log](../log/fa.md#versions)") == "[log](../log/fa.md#versions)"
    assert link("[home](../../README.md)") == "[home](../index.md)"
    assert link("[numerics](docs/numerics.md)", "README.md") == "[numerics](numerics.md)"
    assert link("![plot](../../bench/results/nvidia-h200/sm90.svg)") == "![plot](../bench/results/nvidia-h200/sm90.svg)"
    assert link("[`api`](../../qflash/api.py)") == "`api`"
    assert link("[api.py](../../qflash/api.py)") == "`api.py`"
    assert link("[a test](../../tests/unit/test_docs.py)") == "a test"
    assert link("[elsewhere](https://example.org/a)") == "[elsewhere](https://example.org/a)"
    monkeypatch.setattr(hook, "source_address", lambda: "https://example.org/qflash/blob/main")
    assert link("[`api`](../../qflash/api.py)") == "[`api`](https://example.org/qflash/blob/main/qflash/api.py)"
    assert link("[docs](../../docs)") == "[docs](https://example.org/qflash/blob/main/docs)"
