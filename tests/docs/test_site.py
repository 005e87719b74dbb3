"""The documents as a site: it builds without a warning, loads nothing of other hosts, and has no dead link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.tree import repository

DOCS = repository() / "docs"
WORDS_MAX = 35_800
"""The most words of guides and reference together: nobody reads more. SGLang's guide raised it from 35,000: its readers
have another engine, and read it in place of that engine's.
"""


class Links(HTMLParser):
    """The links of a page, the files that it loads, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.anchors.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(found.get("href", ""))


def links_of(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text())
    return links


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(command, cwd=repository(), env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.slow
def test_no_link_of_the_site_is_dead_and_nothing_comes_from_other_hosts(site: Path) -> None:
    pages = {page.resolve(): links_of(page) for page in site.rglob("*.html")}
    assert len(pages) > 25
    dead = []
    for page, found in pages.items():
        assert [source for source in found.loaded if urlsplit(source).netloc] == []
        for link in [*found.links, *found.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            is_anchor = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
            if not target.exists() or not is_anchor:
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_guides_and_reference_can_be_read() -> None:
    texts = [page.read_text() for folder in ("guides", "reference") for page in (DOCS / folder).glob("*.md")]
    words = sum(len(text.split()) for text in texts)
    assert words < WORDS_MAX


def test_every_page_is_in_the_sites_contents() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (repository() / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
