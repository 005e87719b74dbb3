"""Values as JSON has them, and values that travel between processes as lines of it: dataclasses of plain values, enums,
sequences and dataclasses.

Interpreters of other environments use it, which have nothing but the standard library and numpy.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def to_line(value: Any) -> str:
    """The form that `from_line` reads."""
    return json.dumps(plain(value))


def from_line(kind: type[T], line: str) -> T:
    """The inverse of `to_line`. Raises ValueError, KeyError and TypeError for what is no such value."""
    made: T = _made(kind, json.loads(line))
    return made


def plain(value: Any) -> Any:
    """Nested values as JSON has them: dataclasses as objects, enums by their values, paths as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {plain(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _made(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _made(next(each for each in arguments if each is not type(None)), value)
    if origin is tuple:
        return tuple(_made(arguments[0], entry) for entry in value)
    if origin in (list, Sequence):
        return [_made(arguments[0], entry) for entry in value]
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _made(hints[name], entry) for name, entry in value.items()})  # type: ignore[operator]
    return kind(value) if isinstance(kind, type) and issubclass(kind, (Enum, Path)) else value
