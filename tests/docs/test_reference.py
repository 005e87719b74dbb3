"""The reference of settings is what the models say, and what `objectcache config` prints loads."""

from __future__ import annotations

import tomllib

import pytest

from objectcache.cli.config import Config
from objectcache.cli.config_reference import reference
from objectcache.cli.main import run
from tests.docs.reference import PAGE, written
from tests.support.tree import repository


def test_the_page_has_the_settings_of_now() -> None:
    page = (repository() / PAGE).read_text()
    assert page == written(page), "run `make reference`"


def test_a_printed_file_sets_nothing_and_its_lines_can_be_uncommented(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed) == {}
    assert all(line.startswith("# ") for line in printed.splitlines() if line)
    uncommented = "\n".join(line.removeprefix("# ") for line in printed.splitlines())
    assert tomllib.loads(uncommented) == tomllib.loads(reference(Config, as_comments=False))
    Config.model_validate(tomllib.loads(uncommented))


def test_each_example_is_the_default_where_there_is_one() -> None:
    """So a reader of the page knows what happens without a key."""
    said = Config.model_validate(tomllib.loads(reference(Config, as_comments=False)))
    for name in ("gateway", "compression"):
        table, default = getattr(said, name), getattr(Config(), name)
        for key, field in type(table).model_fields.items():
            if (
                "default" in (field.description or "")
                or field.default in (None, ())
                or key in ("codecs", "classes", "models")
            ):
                continue
            assert getattr(table, key) == getattr(default, key), f"{name}.{key}"
