"""The README's Python blocks run as they stand, its links lead somewhere, and its tables are those of the rows;
what it must tell of the package is there."""

import re
from pathlib import Path

import pytest

from qflash.cli.bench import load
from qflash.dispatch import KERNELS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_blocks_for_each_framework():
    assert {name for name in ("numpy", "torch", "jax") if f"import {name}" in "".join(BLOCKS)} == {
        "numpy",
        "torch",
        "jax",
    }


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_python_blocks_run(block):
    for name in re.findall(r"^import (torch|jax)", block, re.MULTILINE):
        pytest.importorskip(name)
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_variable_the_package_reads_is_explained():
    read = set()
    for path in (ROOT / "qflash").rglob("*"):
        if path.suffix in (".py", ".cc", ".h") and path.is_file():
            read |= set(re.findall(r'(?:environ(?:\.get\(|\[)|getenv\()"(QFLASH_\w+)"', path.read_text()))
    assert read
    assert [name for name in sorted(read) if f"| `{name}` |" not in README] == []


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_has_a_page(kernel):
    name = kernel.page or kernel.name
    page = (ROOT / "docs" / "kernels" / f"{name}.md").read_text()
    if kernel.op == "attention":
        assert any(f"<!-- qflash:{section} -->" in page for section in (f"results-{name}", f"kernel-{kernel.name}"))
    else:
        assert f"`{kernel.name}`" in page


def test_tables_are_up_to_date_with_the_rows():
    assert load("report").update(check_only=True) == []
