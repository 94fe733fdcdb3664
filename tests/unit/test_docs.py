"""Pages of docs/: their links lead somewhere, kernel pages are short, and results are made from rows alone."""

import re
from pathlib import Path

import pytest

from qflash.cli.bench import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
KERNEL_PAGES = sorted((ROOT / "docs" / "kernels").glob("*.md"))
LONGEST = 250  # lines of a kernel page
report, store, result_pages, highlights = (load(name) for name in ("report", "rows", "result_pages", "highlights"))


def named(path):
    return str(path.relative_to(ROOT))


def anchors(page):
    """The headings of a page as GitHub links to them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings(page):
    dead = []
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(f"{link}#{anchor}")
    assert dead == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "ARCHITECTURE.md"], ids=named)
def test_lists_are_lists_on_git_hosts_and_on_the_site(page):
    """Python-Markdown, which makes the site, wants a blank line before a list, and four spaces inside of one."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^<!-- .* -->$", "", prose, flags=re.MULTILINE)  # markers, which the site leaves out
    item = re.compile(r" *(?:[-*]|\d+\.) ")
    wrong, before = [], ""
    for line in prose.splitlines():
        starts = item.match(line)
        inside = before.startswith(" ") or item.match(before)
        if (starts and before.strip() and not inside) or re.match(r" {1,3}(?:[-*]|\d+\.) ", line):
            wrong.append(line)
        if not before.strip() and re.match(r" {1,3}\S", line):
            wrong.append(line)
        before = line
    assert wrong == []


@pytest.mark.parametrize("page", KERNEL_PAGES, ids=named)
def test_a_kernel_page_is_short(page):
    assert len(page.read_text().splitlines()) <= LONGEST


def test_every_page_of_a_folder_is_linked():
    for folder in ("results", "log", "decisions"):
        index = (ROOT / "docs" / folder / "README.md").read_text()
        pages = [path for path in (ROOT / "docs" / folder).rglob("*.md") if path.name != "README.md"]
        assert pages
        assert [path for path in pages if f"]({path.relative_to(ROOT / 'docs' / folder)})" not in index] == []


@pytest.mark.parametrize("page", highlights.TABLES)
def test_a_kernel_page_shows_few_results(page):
    assert f"<!-- qflash:results-{page} -->" in (ROOT / "docs" / "kernels" / f"{page}.md").read_text()
    shown = highlights.TABLES[page]()
    tables = re.split(r"^\| --- .*$", shown, flags=re.MULTILINE)[1:]
    if not tables:  # a kernel that is not measured yet
        makes = r"`(?:qflash bench |python -m bench\.)(\w+)` makes them\."
        preset = re.fullmatch(f"No rows are committed yet; {makes}", shown)
        assert preset and not list(store.RESULTS.glob(f"*/{preset[1]}.jsonl"))
    for table in tables:
        lines = [line for line in table.strip().split("\n\n")[0].splitlines() if line.startswith("|")]
        assert 1 <= len(lines) <= highlights.MOST


def test_every_committed_row_has_a_page():
    shown = {preset for page in result_pages.PAGES for preset in page.presets}
    committed = {path.stem for path in store.RESULTS.glob("*/*.jsonl")} - {"run"}
    assert committed <= shown
    assert shown <= set(report.TABLES)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Rows of one preset of one machine, and an empty folder for pages."""
    monkeypatch.setattr(store, "RESULTS", tmp_path / "rows")
    monkeypatch.setattr(result_pages, "FOLDER", tmp_path / "docs" / "results")
    (tmp_path / "rows" / "m-2c").mkdir(parents=True)
    (tmp_path / "rows" / "m-2c" / "cpu.jsonl").write_text("{}\n")
    return tmp_path / "docs" / "results"


def render():
    return result_pages.render({"cpu": lambda machine: f"rows of {machine}"}, lambda kernel, gpu: "")


def test_pages_are_made_where_there_are_rows(results):
    pages = render()
    assert set(pages) == {results / "README.md", results / "m-2c" / "cpu.md"}
    assert "rows of m-2c" in pages[results / "m-2c" / "cpu.md"]
    assert "## m-2c\n\n- [The CPU engine](m-2c/cpu.md)\n" in pages[results / "README.md"]


def test_a_machine_that_only_has_a_run_is_not_listed(results):
    """`make run` leaves rows that are nobody else's, and no page may go out of date by it."""
    before = render()
    (store.RESULTS / "other-2c").mkdir()
    (store.RESULTS / "other-2c" / "run.jsonl").write_text("{}\n")
    assert render() == before


def test_plots_stand_where_they_were_drawn(results, monkeypatch):
    monkeypatch.setattr(
        result_pages, "PAGES", [result_pages.Page("cpu", "T", None, {"cpu": "H"}, "", ("both", "Both"))]
    )
    assert "![" not in render()[results / "m-2c" / "cpu.md"]
    for name in ("cpu", "both", "accuracy-speed"):
        (store.RESULTS / "m-2c" / f"{name}.svg").touch()
    page = render()[results / "m-2c" / "cpu.md"]
    both, heading, plot, rows = (page.index(text) for text in ("![Both](", "## H", "![T: H](", "rows of m-2c"))
    assert both < heading < plot < rows
    assert report.tradeoff() == "![Error against speed on m-2c](../../bench/results/m-2c/accuracy-speed.svg)"


def test_a_roofline_stands_on_the_page_of_profiles(results, tmp_path, monkeypatch):
    profiles = load("profiles")
    monkeypatch.setattr(profiles, "PROFILES", tmp_path / "profiles")
    (tmp_path / "profiles" / "m-2c").mkdir(parents=True)
    (tmp_path / "profiles" / "m-2c" / "fa.csv").touch()
    assert "roofline" not in render()[results / "m-2c" / "profiles.md"]
    (tmp_path / "profiles" / "m-2c" / "roofline.svg").touch()
    assert "](../../../profiles/m-2c/roofline.svg)" in render()[results / "m-2c" / "profiles.md"]


def test_pages_that_differ_from_the_rows_are_told_and_mended(results):
    told = ["docs/results/m-2c/cpu.md", "docs/results/README.md"]
    assert result_pages.update(render(), check_only=True) == told
    assert not results.exists()
    assert result_pages.update(render()) == told
    assert result_pages.update(render(), check_only=True) == []
    (results / "m-2c" / "cpu.md").write_text("edited")
    (results / "m-2c" / "orphan.md").write_text("of rows that are gone")
    assert result_pages.update(render()) == ["docs/results/m-2c/cpu.md", "docs/results/m-2c/orphan.md"]
    assert not (results / "m-2c" / "orphan.md").exists()
    assert result_pages.update(render(), check_only=True) == []
