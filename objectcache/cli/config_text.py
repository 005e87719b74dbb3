"""Editing a config file's text so that everything else in it stays as its owner wrote it. Pure.

Every edit is checked: the new text must parse to the old values with only the wanted values changed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Scalar = str | int | float | bool
Table = Mapping[str, "Scalar | Table"]
_HEADER = re.compile(r"\s*(?P<opening>\[\[?)\s*(?P<name>[^\[\]#]+?)\s*\]\]?\s*(#.*)?$")
_VALUE = r"""("[^"]*"|'[^']*'|[^#\s]+)"""
WRITTEN_BY = "# written by `objectcache calibrate`; its next run replaces this table"


class ConfigTextError(Exception):
    """A text that cannot be edited safely."""


@dataclass(frozen=True, slots=True)
class _Header:
    path: tuple[str, ...]
    is_array: bool


def with_profile(text: str, profile: Mapping[str, Scalar]) -> str:
    """`text` with the `[[compute_profiles]]` of that name changed to `profile`, or added. Raises ConfigTextError."""
    return with_entry(text, "compute_profiles", profile)


def with_values(text: str, name: str, values: Mapping[str, Scalar]) -> str:
    """`text` with these values in the table `[name]`, which is added where it is missing. Raises ConfigTextError."""
    before = _parsed(text)
    old = before.get(name, {})
    if not isinstance(old, dict):
        raise ConfigTextError(f"{name} is no table")
    lines = text.splitlines()
    at = next((index for index, line in enumerate(lines) if _header(line) == _Header((name,), is_array=False)), None)
    if at is None:
        lines = [*lines, *([""] if lines else []), f"[{name}]"]
        at = len(lines) - 1
    lines = _with_values(lines, at, _changed(old, values))
    return _proved(text, lines, {**before, name: {**old, **values}}, f"[{name}]")


def with_entry(text: str, name: str, entry: Mapping[str, Scalar]) -> str:
    """`text` with the entry of the array of tables `[[name]]` that has the same `name` changed, or a new entry at the
    end. Raises ConfigTextError.
    """
    before = _parsed(text)
    entries = before.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ConfigTextError(f"{name} is no array of tables")
    found = [index for index, each in enumerate(entries) if each.get("name") == entry["name"]]
    if len(found) > 1:
        raise ConfigTextError(f"more than one of its [[{name}]] is named {entry['name']}")
    lines = text.splitlines()
    if not found:
        lines = [*_trimmed(lines), *([""] if lines else []), f"[[{name}]]", *_entries(entry)]
        return _proved(text, lines, {**before, name: [*entries, dict(entry)]}, f"[[{name}]]")
    heads = [index for index, line in enumerate(lines) if _header(line) == _Header((name,), is_array=True)]
    wanted = [dict(entry) if index == found[0] else each for index, each in enumerate(entries)]
    if len(heads) == len(entries):
        lines = _with_values(lines, heads[found[0]], _changed(entries[found[0]], entry))
    return _proved(text, lines, {**before, name: wanted}, f"[[{name}]]")


def with_table(text: str, path: tuple[str, ...], table: Table) -> str:
    """`text` with the table `[path]` and its sub-tables replaced, or added at the end. Raises ConfigTextError."""
    before = _parsed(text)
    lines = _trimmed(_without(text.splitlines(), path))
    ours = table_lines(path, table)
    lines += [*([""] if lines else []), ours[0], WRITTEN_BY, *ours[1:]]
    return _proved(text, lines, _replaced(before, path, table), f"[{'.'.join(path)}]")


def table_lines(name: Sequence[str], table: Table) -> list[str]:
    """A table and its sub-tables as TOML, one line for each entry. A table without entries has no header."""
    entries = _entries({key: value for key, value in table.items() if not isinstance(value, Mapping)})
    lines = [f"[{'.'.join(name)}]", *entries] if entries else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += [*([""] if lines else []), *table_lines((*name, key), value)]
    return lines


def entry_lines(name: str, entry: Mapping[str, Scalar]) -> list[str]:
    """One entry of an array of tables as TOML."""
    return [f"[[{name}]]", *_entries(entry)]


def literal(value: Scalar) -> str:
    """A TOML literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(map(_escaped, value)) + '"'
    return repr(value)


def _entries(values: Mapping[str, Scalar]) -> list[str]:
    return [f"{key} = {literal(value)}" for key, value in values.items()]


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x20 or ord(letter) == 0x7F else letter


def _parsed(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigTextError(str(error)) from None


def _proved(old: str, lines: Sequence[str], wanted: Mapping[str, object], what: str) -> str:
    """The lines as a text with the old text's line ends. Raises ConfigTextError unless the text has the
    wanted values.
    """
    newline = "\r\n" if "\r\n" in old else "\n"
    edited = newline.join([*_trimmed(lines), ""])
    try:
        is_right = _parsed(edited) == wanted
    except ConfigTextError:
        is_right = False
    if not is_right:
        raise ConfigTextError(f"its {what} is written in a way that cannot be edited safely")
    return edited


def _replaced(old: Mapping[str, object], path: Sequence[str], table: Table) -> dict[str, object]:
    inner = old.get(path[0], {})
    if not isinstance(inner, Mapping):
        raise ConfigTextError(f"{path[0]} is no table")
    return {**old, path[0]: _replaced(inner, path[1:], table) if len(path) > 1 else table}


def _changed(old: Mapping[str, object], values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {key: value for key, value in values.items() if key not in old or old[key] != value}


def _header(line: str) -> _Header | None:
    found = _HEADER.match(line)
    if found is None:
        return None
    return _Header(tuple(part.strip() for part in found["name"].split(".")), found["opening"] == "[[")


def _with_values(lines: Sequence[str], at: int, values: Mapping[str, Scalar]) -> list[str]:
    """The lines with values of the table whose header is line `at` changed in place, or added behind the header."""
    edited = list(lines)
    end = next((index for index in range(at + 1, len(lines)) if _header(lines[index]) is not None), len(lines))
    new = []
    for key, value in values.items():
        pattern = re.compile(rf"(?P<before>\s*{re.escape(key)}\s*=\s*){_VALUE}(?P<after>\s*(#.*)?)$")
        for index in range(at + 1, end):
            if (found := pattern.match(lines[index])) is not None:
                edited[index] = f"{found['before']}{literal(value)}{found['after']}"
                break
        else:
            new.append(f"{key} = {literal(value)}")
    return [*edited[: at + 1], *new, *edited[at + 1 :]]


def _without(lines: Sequence[str], path: tuple[str, ...]) -> list[str]:
    """The lines without those of the table and its sub-tables."""
    left: list[str] = []
    dropping: list[str] = []
    is_ours = False
    for line in lines:
        header = _header(line)
        if header is not None:
            was_ours = is_ours
            is_ours = header.path[: len(path)] == path
            if was_ours and not is_ours:
                left += _trailing_remarks(dropping)
            dropping = []
        (dropping if is_ours else left).append(line)
    return left + (_trailing_remarks(dropping) if is_ours else [])


def _trailing_remarks(lines: Sequence[str]) -> list[str]:
    """The comments and blank lines at the end, which belong to the table that follows."""
    start = len(lines)
    while start and (not lines[start - 1].strip() or lines[start - 1].lstrip().startswith("#")):
        start -= 1
    return [line for line in lines[start:] if line != WRITTEN_BY]


def _trimmed(lines: Sequence[str]) -> list[str]:
    """The lines without blank lines at the end."""
    end = len(lines)
    while end and not lines[end - 1].strip():
        end -= 1
    return list(lines[:end])
