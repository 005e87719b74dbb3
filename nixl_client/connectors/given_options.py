"""Options that users write as JSON or YAML, made into a dataclass's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


def arguments(cls: type[Any], given: Mapping[str, object], enums: Mapping[str, type[Enum]]) -> dict[str, Any]:
    """Arguments for `cls`, a dataclass of plain fields and of `enums`. Raises ValueError for unknown names, for values
    of the wrong type, and for what an enum does not have.
    """
    kinds = {field.name: str(field.type) for field in fields(cls)}
    if unknown := sorted(set(given) - set(kinds)):
        raise ValueError(f"unknown options: {', '.join(unknown)}")
    return {name: _value(name, value, kinds[name], enums.get(name)) for name, value in given.items()}


def _value(name: str, value: object, kind: str, enum: type[Enum] | None) -> object:
    if enum is not None:
        known = {str(each.value): each for each in enum}
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        return known[str(value)]
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} must be of type {kind}, not {value!r}")
    return value
