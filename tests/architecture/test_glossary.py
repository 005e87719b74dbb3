"""docs/design/glossary.md gives each word one meaning."""

from __future__ import annotations

import re
from collections import Counter

from tests.support.tree import repository

PAGE = repository() / "docs" / "design" / "glossary.md"


def defined_words(page: str) -> list[str]:
    """The words that rows of tables define: in bold, or beside a symbol."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0].startswith("---") or "meaning" in cells:
            continue
        words = re.findall(r"\*\*(.+?)\*\*", " ".join(cells[:-1]))
        found += words or [cells[-2]]
    return [word.lower() for word in found]


def test_no_word_is_defined_twice() -> None:
    words = defined_words(PAGE.read_text())
    assert len(words) > 100
    assert [word for word, count in Counter(words).items() if count > 1] == []


def test_words_are_found_with_and_without_symbols() -> None:
    page = "| | word | meaning |\n|---|---|---|\n| N | chunk count | x |\n| | **a**, **b** | of **c** |\n| **d** | y |"
    assert defined_words(page) == ["chunk count", "a", "b", "d"]
