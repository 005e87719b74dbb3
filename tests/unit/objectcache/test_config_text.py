"""Edits of a config file change what they are for and leave every other byte to its owner."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.cli.config import ConfigError, load_config
from objectcache.cli.config_file import edit_file
from objectcache.cli.config_text import (
    ConfigTextError,
    entry_lines,
    with_entry,
    with_profile,
    with_table,
    with_values,
)

OWN = """# of a deployment
[storage]
dram_bytes = 4096

[scheduler]   # shared
# not link_bytes_per_s = 7
link_bytes_per_s = 1e9   # the NIC's

[[tenants]]
access_key = "A"
[[tenants]]
access_key = "B" # second

[[compute_profiles]]
name = "mine"   # measured by hand
num_layers = 32
token_layer_bytes = 4096
request_us = 100.0
token_us = 2.0 # a guess
token_pair_us = 0.001
hit_rate = 0.5

# the other one
[[compute_profiles]]
name = "theirs"
num_layers = 28
token_layer_bytes = 1024
request_us = 1.0
token_us = 1.0
token_pair_us = 0.0
hit_rate = 0.9

# the end
"""
SCHEDULER = {"link_bytes_per_s": 2e9, "margin_bytes_per_s": 5e7}
MINE = {
    "name": "mine",
    "num_layers": 32,
    "token_layer_bytes": 4096,
    "request_us": 7000.5,
    "token_us": 3.5,
    "token_pair_us": 0.001,
    "hit_rate": 0.75,
}


def test_values_change_in_their_lines_and_new_ones_go_behind_the_header() -> None:
    """Comments beside them stay; the same word in a comment is no value."""
    edited = with_values(OWN, "scheduler", SCHEDULER)
    assert edited == OWN.replace("= 1e9   # the", "= 2000000000.0   # the").replace(
        "[scheduler]   # shared\n", "[scheduler]   # shared\nmargin_bytes_per_s = 50000000.0\n"
    )


@pytest.mark.parametrize("written", ['"12.5 GB"', "'12.5 GB'", '"#1"'])
def test_a_value_in_quotes_changes_as_a_whole(written: str) -> None:
    """A rate may be written with a unit, and with a space before it."""
    text = f"[scheduler]\nlink_bytes_per_s = {written}  # the NIC's\n"
    assert with_values(text, "scheduler", {"link_bytes_per_s": 2e9}) == text.replace(written, "2000000000.0")


def test_a_value_is_not_looked_for_in_other_tables() -> None:
    """Two tables may have keys of one name."""
    text = "[scheduler]\npolicy = 'equal'\n[gateway]\nmargin_bytes_per_s = 1\n"
    assert tomllib.loads(with_values(text, "scheduler", {"margin_bytes_per_s": 2.0})) == {
        "scheduler": {"policy": "equal", "margin_bytes_per_s": 2.0},
        "gateway": {"margin_bytes_per_s": 1},
    }


def test_a_profile_changes_in_its_lines() -> None:
    """Only what is new in it; other profiles, their order and all comments stay."""
    edited = with_profile(OWN, MINE)
    assert edited == (
        OWN.replace("request_us = 100.0", "request_us = 7000.5", 1)
        .replace("token_us = 2.0 # a guess", "token_us = 3.5 # a guess")
        .replace("hit_rate = 0.5", "hit_rate = 0.75")
    )


def test_a_new_profile_goes_to_the_end() -> None:
    """With what was there before it untouched."""
    edited = with_profile(OWN, {**MINE, "name": "new"})
    assert edited.startswith(OWN + "\n[[compute_profiles]]\n")
    assert [each["name"] for each in tomllib.loads(edited)["compute_profiles"]] == ["mine", "theirs", "new"]
    assert with_profile("", MINE) == "\n".join([*entry_lines("compute_profiles", MINE), ""])


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_stay(newline: str) -> None:
    """An editor on another system wrote the file."""
    text = OWN.replace("\n", newline)
    for edited in (with_profile(text, MINE), with_values(text, "scheduler", SCHEDULER)):
        assert edited.count("\n") == edited.count(newline)


@pytest.mark.parametrize(
    "text",
    [
        "compute_profiles = [{name = 'mine', num_layers = 1}]\n",
        "[[compute_profiles]]\nname = 'mine'\n[[compute_profiles]]\nname = 'mine'\n",
        "[[compute_profiles]]\nname = 'mine'\nsurprise = 1\n",
        "[compute_profiles]\nname = 'mine'\n",
        "compute_profiles = 1\n",
    ],
    ids=["inline", "two of the name", "more in it", "a table", "a number"],
)
def test_a_profile_that_cannot_be_replaced_safely_is_refused(text: str) -> None:
    """Better none than a file that says something else."""
    with pytest.raises(ConfigTextError):
        with_profile(text, MINE)


@pytest.mark.parametrize(
    "text", ["compression = 1\n", "[compression]\nclasses = 1\n", "compression = {classes = {code = {a = 1}}}\n"]
)
def test_a_table_that_cannot_be_replaced_safely_is_refused(text: str) -> None:
    """The same for tables."""
    with pytest.raises(ConfigTextError):
        with_table(text, ("compression", "classes", "code"), {"kivi4-1": 0.93})


SCALARS = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(max_size=8))


@given(st.dictionaries(st.sampled_from("abcd"), SCALARS), st.dictionaries(st.sampled_from("cdef"), SCALARS, min_size=1))
def test_an_entry_comes_to_what_was_wanted_or_is_refused(old: dict[str, object], new: dict[str, object]) -> None:
    """Never to a third thing."""
    text = "\n".join(entry_lines("x", {"name": "n", **old}))  # type: ignore[dict-item]
    try:
        edited = with_entry(text, "x", {"name": "n", **new})  # type: ignore[dict-item]
    except ConfigTextError:
        return
    assert tomllib.loads(edited) == {"x": [{"name": "n", **new}]}


def test_an_edit_that_makes_no_configuration_leaves_the_file(tmp_path: Path) -> None:
    """The new text is loaded before it takes the old one's place."""
    path = tmp_path / "objectcache.toml"
    path.write_text(OWN)
    with pytest.raises(ConfigError):
        edit_file(path, lambda text: with_values(text, "scheduler", {"link_bytes_per_s": 0.0}))
    assert path.read_text() == OWN
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_written_loads(tmp_path: Path) -> None:
    """A server takes the figures as its own."""
    path = tmp_path / "objectcache.toml"
    path.write_text(OWN)
    edit_file(path, lambda text: with_profile(with_values(text, "scheduler", SCHEDULER), MINE))
    config = load_config(path)
    settings = config.scheduler_settings()
    assert (settings.link_bytes_per_s, settings.pool.margin_bytes_per_s) == (2e9, 5e7)
    assert [each.name for each in settings.profiles] == ["mine", "theirs"]
    assert settings.profiles[0].request_us == 7000.5
