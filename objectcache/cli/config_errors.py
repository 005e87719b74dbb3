"""Mistakes in a config file, told so that a person can mend them. Pure."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

UNKNOWN = "extra_forbidden"
_OF_VALIDATORS = "Value error, "
_UNQUOTED_SIZE = re.compile(r"\s*(?P<name>[\w.-]+)\s*=\s*(?P<value>\d[\d._]*\s*[A-Za-z/]{1,8})\s*(#.*)?$")
_LINE = re.compile(r"at line (\d+)")


def told(model: type[BaseModel], errors: Sequence[Mapping[str, Any]]) -> str:
    """The first of pydantic's errors about a file of this model: its place, what is wrong, and the likeliest remedy. A
    name that is not known comes first, because what is missing is often what it was meant to be.
    """
    error = min(errors, key=lambda each: each["type"] != UNKNOWN)
    place = list(error["loc"])
    if error["type"] == UNKNOWN:
        known = _names_at(model, place[:-1])
        near = difflib.get_close_matches(str(place[-1]), known, 1, 0.6)
        remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        return f"{_dotted(place)}: not known; {remedy}"
    return f"{_dotted(place)}: {str(error['msg']).removeprefix(_OF_VALIDATORS)}"


def unquoted(text: str, message: str) -> str | None:
    """The remedy where the line of a TOML error has a size or a rate without quotes; None where it has not."""
    place = _LINE.search(message)
    lines = text.splitlines()
    if place is None or not 1 <= int(place[1]) <= len(lines):
        return None
    found = _UNQUOTED_SIZE.match(lines[int(place[1]) - 1])
    return None if found is None else f'line {place[1]}: a value with a unit needs quotes: {found[1]} = "{found[2]}"'


def _dotted(place: Sequence[str | int]) -> str:
    """`credentials.0.actions` of pydantic is the first `[[credentials]]` of the file."""
    text = ""
    for part in place:
        text += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _names_at(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """The names that a table of the file may have."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            inner = _model_in(model.model_fields[part].annotation)
            model = model if inner is None else inner
    return sorted(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in X, X | None, tuple[X, ...] or dict[str, X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in typing.get_args(annotation) if (found := _model_in(each)) is not None), None)
