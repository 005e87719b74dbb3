"""Rules of STYLE that a program can check in Markdown pages and docstrings."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.tree import repository

ROOT = repository()
LINE_CHARACTERS_MAX = 120
README_LINES_MAX = 80
FOLDERS = (
    "bench",
    "descriptors",
    "gateway",
    "nixl_client",
    "objectcache",
    "storage_server",
    "tests",
)
PLAIN_FOLDERS = (*(folder for folder in FOLDERS if folder not in ("bench", "tests")), "fuzz")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("*.md")])
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def prose_lines(page: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line outside code blocks and sections that `make figures` writes."""
    is_code = is_generated = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif line.startswith("<!-- figures:"):
            is_generated = True
        elif line.startswith("<!-- /figures -->"):
            is_generated = False
        elif not is_code and not is_generated and not line.startswith("    "):
            yield number, line


def long_lines(page: str) -> list[int]:
    """Numbers of the lines that are too long. A row of a table and a link cannot be broken."""
    return [
        number
        for number, line in prose_lines(page)
        if len(re.sub(r"\]\([^)]*\)", "]", line)) > LINE_CHARACTERS_MAX and not line.startswith("|")
    ]


def uneven_rows(page: str) -> list[int]:
    """Numbers of the rows of tables that have more or fewer cells than the head of their table."""
    found, cell_count = [], 0
    for number, line in enumerate(page.splitlines(), 1):
        cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) - 1 if line.startswith("|") else 0
        if cells and cell_count and cells != cell_count:
            found.append(number)
        cell_count = cell_count or cells if cells else 0
    return found


def who_sentences(text: str) -> list[str]:
    """Statements that begin with "Who": their subject is hard to find. Questions may begin so."""
    return statements(text, "Who")


def hidden_subjects(text: str) -> list[str]:
    """Statements whose subject is a clause, such as "What is stored stays": nobody can see what stays."""
    return statements(text, "Who|Whoever|Whose|Whom|What|Whatever")


def statements(text: str, beginning: str) -> list[str]:
    """Sentences of a text that begin with one of these words, and are no questions."""
    sentences = re.findall(rf"(?:^|[.:!?] |\n\n|\| )((?:{beginning}) [^.?!|]*[.?!|]?)", text)
    return [sentence for sentence in sentences if not sentence.endswith(("?", "|"))]


def unwrapped(text: str) -> str:
    """The paragraphs of a docstring, each in one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


@cache
def parsed(path: Path) -> ast.Module:
    """A module, parsed once for all tests."""
    return ast.parse(path.read_text())


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each comment."""
    with path.open() as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands alone: docstrings, also those of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_what_is_said_of_a_name_is_a_sentence() -> None:
    """`\"\"\"Of one bucket.\"\"\"` leaves the reader to guess what is counted."""
    assert [path for path in MODULES if re.search(r'^ *"""Of ', path.read_text(), re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_short_lines_and_no_spaces_at_their_ends(page: Path) -> None:
    """Long lines make changes hard to review."""
    text = page.read_text()
    assert long_lines(text) == []
    assert [number for number, line in enumerate(text.splitlines(), 1) if line != line.rstrip()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_a_table_have_the_cells_of_its_head(page: Path) -> None:
    """A cell too many is not shown, and with it the end of a sentence."""
    assert uneven_rows(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_row_of_a_table_has_a_line(page: Path) -> None:
    """A table whose rows were filled into one paragraph is shown as text."""
    lines = [re.sub(r"`[^`]*`", "", line) for _, line in prose_lines(page.read_text())]
    assert [line for line in lines if "|---|" in line and not re.fullmatch(r"[|:-]+", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_of_the_repository(page: Path) -> None:
    prose = "\n".join(re.sub(r"`[^`]*`", "", line) for _, line in prose_lines(page.read_text()))
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose)]
    local = [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_of_a_page_begins_with_who(page: Path) -> None:
    assert who_sentences("\n".join(line for _, line in prose_lines(page.read_text()))) == []


@pytest.mark.slow
def test_no_sentence_of_a_docstring_begins_with_who() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": sentences
        for path in MODULES
        for line, text in docstrings(parsed(path))
        if (sentences := who_sentences(text))
    }
    assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize("folder", PLAIN_FOLDERS)
def test_every_statement_of_the_product_has_a_visible_subject(folder: str) -> None:
    """In docstrings and comments."""
    found = {
        f"{path.relative_to(ROOT)}:{line}": sentences
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in (*docstrings(parsed(path)), *comments(path))
        if (sentences := hidden_subjects(unwrapped(text)))
    }
    assert found == {}


def test_no_test_is_named_after_who() -> None:
    """A test's name is a rule, with a subject."""
    assert [path for path in MODULES if re.search(r"^ *(async )?def test_who_", path.read_text(), re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_one_title(page: Path) -> None:
    assert len([line for _, line in prose_lines(page.read_text()) if line.startswith("# ")]) == 1


def test_the_readme_is_short() -> None:
    """Figures and details have pages of their own."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize(
    ("page", "numbers"),
    [
        ("a" * 121, [1]),
        ("a" * 120, []),
        ("| " + "a" * 121, []),
        ("```\n" + "a" * 121 + "\n```\n" + "a" * 121, [4]),
        ("[page](https://" + "a" * 121 + ")", []),
        ("<!-- figures: x -->\n" + "a" * 121 + "\n<!-- /figures -->", []),
    ],
)
def test_long_lines_are_found(page: str, numbers: list[int]) -> None:
    assert long_lines(page) == numbers


def test_uneven_rows_are_found() -> None:
    assert uneven_rows("| a | b |\n|---|---|\n| `x|y` | c |\n| | d | e |\n\n| a |\n|---|\n| b |") == [4]


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("Who cannot send makes room.", True),
        ("A slot is free. Who waits gets it.", True),
        ("Who may have it?", False),
        ("The key of the client who waits.", False),
        ("| Who may send | anybody |", False),
    ],
)
def test_sentences_that_begin_with_who_are_found(text: str, is_found: bool) -> None:
    assert bool(who_sentences(text)) is is_found


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("What is dirty stays.", True),
        ("Chunks come. Whoever\n    waits goes on.", True),
        ("Whatever it is: it goes", True),
        ("Nobody knows what it is. The client says whose it is.", False),
        ("What is it?", False),
    ],
)
def test_statements_without_a_visible_subject_are_found(text: str, is_found: bool) -> None:
    assert bool(hidden_subjects(unwrapped(text))) is is_found
