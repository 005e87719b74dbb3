"""Options with a few values, given as members or as their names."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

_E = TypeVar("_E", bound=Enum)


def chosen(kind: type[_E], value: _E | str, name: str) -> _E:
    """The member. Raises ValueError, saying what there is, for anything else."""
    if isinstance(value, kind):
        return value
    for member in kind:
        if isinstance(value, str) and member.value == value:
            return member
    names = ", ".join(repr(member.value) for member in kind)
    raise ValueError(f"{name} is one of {names}, not {value!r}")
