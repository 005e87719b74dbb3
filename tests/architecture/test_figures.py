"""The figures of README and docs are those of docs/results, and no others."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from bench.core.show import NOT_MEASURED, as_markdown, significant, written
from bench.experiments.aggregate.ratios import show
from bench.figures import DOCUMENTS, SECTIONS, load, render

RESULTS = load()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_documents_say_what_the_results_say(document: Any) -> None:
    text = document.read_text()
    assert render(text, RESULTS) == text, "run `make figures`"


def test_every_section_has_its_place_and_every_place_its_section() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS[1:])
    places = re.findall(r"^<!-- figures: ([a-z0-9-]+) -->$", text, re.MULTILINE)
    assert len(places) == text.count("<!-- figures:") == len(re.findall("^<!-- /figures -->$", text, re.MULTILINE))
    assert set(places) == {*SECTIONS, "commits"}
    assert len(places) == len(set(places))


def test_a_number_that_was_changed_by_hand_is_found() -> None:
    text = DOCUMENTS[1].read_text()
    assert "| `shm` |" in text
    assert render(re.sub(r"\| `shm` \| [0-9.]+", "| `shm` | 99.9", text), RESULTS) == text


def test_a_place_is_filled_where_its_first_line_was_joined_to_its_marker() -> None:
    joined = "<!-- figures: theta --> 5 MiB,\nby hand\n<!-- /figures -->"
    filled = render(joined, RESULTS)
    assert filled.startswith("<!-- figures: theta -->\nΘ is ")
    assert "by hand" not in filled


def test_readme_measures_nothing_outside_of_generated_places() -> None:
    """Rates, factors and times come with their result or not at all."""
    text = DOCUMENTS[0].read_text().split("## Figures\n")[1].split("## Licence")[0]
    outside = re.sub(r"<!-- figures: .*?<!-- /figures -->", "", text, flags=re.DOTALL)
    assert not re.findall(r"[0-9.]+ (?:GB/s|ms\b|times)|[0-9]+ %", outside)


def test_what_was_not_measured_is_said() -> None:
    assert written({"median": None}) == NOT_MEASURED
    found: Any = copy.deepcopy(RESULTS["aggregate"])
    for ratio in (*found["ratio_details"].values(), *found["further_ratios"].values()):
        ratio |= {"median": None, "ours": None, "theirs": None, "reason": "it was not there", "is_met": False}
    found["ratio_details"]["http_over_lmcache_s3"] = ratio
    assert "it was not there" in as_markdown(show(found)["peers"])


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "0.012"), (0.456, "0.46"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_three_digits_are_shown(value: float, text: str) -> None:
    assert significant(value) == text
