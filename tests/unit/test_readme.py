"""Python blocks of the README and of the guide run as they stand, the README's links lead somewhere, and tables are
those of the rows; what these pages must tell of the package is there."""

import re
from pathlib import Path

import pytest

from qflash.cli.bench import load
from qflash.dispatch import KERNELS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LONGEST = 220  # lines of the README
PAGES = ("README.md", *sorted(f"docs/guide/{path.name}" for path in (ROOT / "docs" / "guide").glob("*.md")))
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= LONGEST


def test_there_are_blocks_for_each_framework():
    of_readme = "".join(block for page, block in BLOCKS if page == "README.md")
    assert [name for name in ("numpy", "torch", "jax") if f"import {name}" not in of_readme] == []


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page}-{at}" for at, (page, _) in enumerate(BLOCKS)])
def test_python_blocks_run(page, block):
    for name in re.findall(r"^(?:import|from) (torch|jax|transformers)", block, re.MULTILINE):
        pytest.importorskip(name)
    exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())  # headings: tests/unit/test_site.py
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_example_is_listed():
    listed = re.findall(r"\]\((\w+\.py)\)", (ROOT / "examples" / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_every_variable_the_package_reads_is_explained():
    read = set()
    for path in (ROOT / "qflash").rglob("*"):
        if path.suffix in (".py", ".cc", ".h") and path.is_file():
            read |= set(re.findall(r'(?:environ(?:\.get\(|\[)|getenv\()"(QFLASH_\w+)"', path.read_text()))
    assert read
    guide = (ROOT / "docs" / "guide" / "install.md").read_text()
    assert [name for name in sorted(read) if f"| `{name}` |" not in guide] == []


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_has_a_page(kernel):
    name = kernel.page or kernel.name
    page = (ROOT / "docs" / "kernels" / f"{name}.md").read_text()
    if kernel.op == "attention":
        assert any(f"<!-- qflash:{section} -->" in page for section in (f"results-{name}", f"kernel-{kernel.name}"))
    else:
        assert f"`{kernel.name}`" in page


def test_tables_are_up_to_date_with_the_rows():
    assert load("report").update(check_only=True) == [], "`qflash report` makes pages and plots from the rows anew"
