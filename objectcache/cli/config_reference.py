"""The reference of all settings, from the models that check them: `objectcache config`, and docs. Pure."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from objectcache.cli.config_text import literal
from objectcache.cli.config_values import Model

COMMENT_COLUMN = 34
NOT_PROMISED = "internals"
NAMES = {"codecs": "kivi4-1"}
"""Examples of names of tables that a file names itself."""


def reference(model: type[Model], *, as_comments: bool) -> str:
    """The whole file with an example for each key. With `as_comments` it sets nothing until a line is uncommented."""
    lines: list[str] = []
    for name, field in model.model_fields.items():
        if name != NOT_PROMISED:
            lines += [*([""] if lines else []), *_table(name, field)]
    return "\n".join([f"# {line}" if as_comments and line else line for line in lines]) + "\n"


def table_in(annotation: Any) -> type[BaseModel] | None:
    """The model in X, X | None, tuple[X, ...] or dict[str, X]; None where it has none."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for each in typing.get_args(annotation) if (found := table_in(each)) is not None), None)


def _table(path: str, field: FieldInfo) -> Iterator[str]:
    """The lines of a table, and of those in it."""
    model = table_in(field.annotation)
    if model is None and field.examples and not isinstance(next(iter(field.examples[0].values())), dict):
        yield _with_comment(f"[{path}]", field.description)
        yield from (f"{_name(key)} = {_literal(value)}" for key, value in field.examples[0].items())
        return
    if model is None:  # a table whose names and keys a file chooses
        for name, values in field.examples[0].items() if field.examples else ():
            yield _with_comment(f"[{path}.{name}]", field.description)
            yield from (f"{_name(key)} = {_literal(value)}" for key, value in values.items())
        return
    head = f"[[{path}]]" if typing.get_origin(field.annotation) is tuple else f"[{path}]"
    yield _with_comment(head, getattr(model, "ABOUT", ""))
    inner = []
    for name, each in model.model_fields.items():
        is_table = table_in(each.annotation) is not None or typing.get_origin(each.annotation) is dict
        if is_table:
            inner.append((name, each))
        else:
            assert each.examples, f"{path}.{name} has no example"
            yield _with_comment(f"{name} = {_literal(each.examples[0])}", each.description)
    for name, each in inner:
        yield ""
        yield from _table(f"{path}.{name}.{NAMES[name]}" if name in NAMES else f"{path}.{name}", each)


def _with_comment(text: str, comment: str | None) -> str:
    return f"{text:{COMMENT_COLUMN - 1}} # {comment}" if comment else text


def _name(key: str) -> str:
    return key if key.replace("_", "").isalnum() else literal(key)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return literal(str(value) if isinstance(value, Path) else value)
