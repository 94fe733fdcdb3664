"""MkDocs hooks: pages and pictures from outside docs/, and links to them.

README.md is the home page and ARCHITECTURE.md a page, both unchanged. A link in them, or in docs/, is written for a
reader of the repository. On the site a link to a page or picture leads to that page or picture; a link to a source file
leads to the repository's address ([project.urls] Source in pyproject.toml) or, while there is none, is code without a
link. docs/decisions/0014-docs-site.md explains why.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md"}  # path in the repository -> in the site
PICTURES = ("bench/results", "profiles")
FENCE = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s]*)(?P<heading>#[^)\s]*)?\)")
PATH = re.compile(r"[\w./]*[./][\w./]*")
MARKER = re.compile(r"^<!-- .*? -->$", re.MULTILINE)


@cache
def source_address() -> str | None:
    """The address where the repository's files can be read, without a trailing slash."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return f"{urls['Source'].rstrip('/')}/blob/main" if "Source" in urls else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures outside docs/."""
    for path, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for folder in PICTURES:
        for picture in sorted((ROOT / folder).rglob("*.svg")):
            name = picture.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    name = page.file.src_uri
    path = next((path for path, site in PAGES.items() if site == name), f"docs/{name}")
    parts = FENCE.split(markdown)
    return "".join(part if at % 2 else for_site(part, path) for at, part in enumerate(parts))


def for_site(markdown: str, path: str) -> str:
    """The text of `path` (in the repository), outside of code: links in the site's form, and no markers."""
    return LINK.sub(lambda link: _link(link, path), MARKER.sub("", markdown))


def site_path(path: str) -> str | None:
    """The site's path of a file of the repository; None: it is not part of the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".svg") and path.startswith(PICTURES) else None


def _link(link: re.Match[str], path: str) -> str:
    if not link["path"] or "://" in link["path"]:
        return link[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link["path"]))
    if not (ROOT / target).exists():
        return link[0]  # MkDocs reports it
    heading = link["heading"] or ""
    found = site_path(target)
    if found is not None and (ROOT / target).is_file():
        start = posixpath.dirname(site_path(path) or "")
        return f"{link['picture']}[{link['text']}]({posixpath.relpath(found, start or '.')}{heading})"
    address = source_address()
    return _code(link["text"]) if address is None else f"[{link['text']}]({address}/{target}{heading})"


def _code(text: str) -> str:
    """A path without a link as code, other text unchanged."""
    return f"`{text}`" if PATH.fullmatch(text) else text
