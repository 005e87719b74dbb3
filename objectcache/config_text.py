"""Editing a config file's text so that everything else in it stays as its owner wrote it. Pure.

Every edit is proved: the new text must parse to the old values with only the wanted ones changed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence

Scalar = str | int | float | bool
Table = Mapping[str, "Scalar | Table"]
_HEADER = re.compile(r"\s*\[\[?\s*(?P<name>[^\[\]#]+?)\s*\]\]?\s*(#.*)?$")
_THETA = re.compile(r"(?P<before>\s*theta_bytes\s*=\s*)(?P<value>[^#\s]+)(?P<after>\s*(#.*)?)$")
WRITTEN_BY = "# written by `objectcache calibrate`; its next run replaces this table"


class ConfigTextError(Exception):
    """The text is not one that can be edited safely."""


def with_calibration(text: str, theta_bytes: int, calibration: Table) -> str:
    """`text` with `theta_bytes` in `[storage]` and `[calibration]` replaced or added. Raises ConfigTextError, also for
    what is no TOML.
    """
    before = _parsed(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = _without_calibration(text.splitlines())
    lines = _with_theta(lines, theta_bytes)
    while lines and not lines[-1].strip():
        lines.pop()
    ours = table_lines(("calibration",), calibration)
    lines += [*([""] if lines else []), ours[0], WRITTEN_BY, *ours[1:]]
    edited = newline.join([*lines, ""])
    storage = before.get("storage", {})
    if not isinstance(storage, dict):
        raise ConfigTextError("storage is no table")
    wanted = {
        **before,
        "storage": {**storage, "theta_bytes": theta_bytes},
        "calibration": calibration,
    }
    try:
        is_right = _parsed(edited) == wanted
    except ConfigTextError:
        is_right = False
    if not is_right:
        raise ConfigTextError("its [storage] or [calibration] is written in a way that cannot be edited safely")
    return edited


def table_lines(name: Sequence[str], table: Table) -> list[str]:
    """A table and those within it as TOML, one line an entry; a header only where it has entries of its own."""
    entries = [f"{key} = {literal(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    lines = [f"[{'.'.join(name)}]", *entries] if entries else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += [*([""] if lines else []), *table_lines((*name, key), value)]
    return lines


def literal(value: Scalar) -> str:
    """A TOML literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(map(_escaped, value)) + '"'
    return repr(value)


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x20 or ord(letter) == 0x7F else letter


def _parsed(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigTextError(str(error)) from None


def _without_calibration(lines: Sequence[str]) -> list[str]:
    kept: list[str] = []
    dropping: list[str] = []
    is_ours = False
    for line in lines:
        header = _HEADER.match(line)
        if header is not None:
            was_ours, is_ours = is_ours, header["name"].partition(".")[0].strip() == "calibration"
            if was_ours and not is_ours:
                kept += _trailing_remarks(dropping)
            dropping = []
        if is_ours:
            dropping.append(line)
        else:
            kept.append(line)
    return kept + (_trailing_remarks(dropping) if is_ours else [])


def _trailing_remarks(lines: Sequence[str]) -> list[str]:
    """Comments and blank lines at the end: they belong to what follows."""
    start = len(lines)
    while start and (not lines[start - 1].strip() or lines[start - 1].lstrip().startswith("#")):
        start -= 1
    return [line for line in lines[start:] if line != WRITTEN_BY]


def _with_theta(lines: Sequence[str], theta_bytes: int) -> list[str]:
    edited = list(lines)
    storage_at = None
    is_storage = False
    for index, line in enumerate(lines):
        header = _HEADER.match(line)
        if header is not None:
            is_storage = header["name"] == "storage"
            storage_at = index if is_storage else storage_at
        elif is_storage and (found := _THETA.match(line)) is not None:
            edited[index] = f"{found['before']}{theta_bytes}{found['after']}"
            return edited
    if storage_at is None:
        return [*edited, *([""] if edited else []), "[storage]", f"theta_bytes = {theta_bytes}"]
    return [*edited[: storage_at + 1], f"theta_bytes = {theta_bytes}", *edited[storage_at + 1 :]]
