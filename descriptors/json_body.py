"""JSON bodies into pydantic models, at a bounded cost whatever they contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

FIELD_NAME_CHARACTERS_MAX = 64
_M = TypeVar("_M", bound=BaseModel)

Refuse = Callable[[str, str], Exception]
"""(field, problem) to the error to raise."""


def parse_body(model: type[_M], body: bytes, refuse: Refuse) -> _M:
    """The model in `body`; raises what `refuse` makes for the first thing wrong.

    Unknown fields are found here and not by pydantic, which would describe every one of a million.
    """
    try:
        fields = from_json(body)
    except ValueError as error:
        raise refuse("body", f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise refuse("body", "is not a JSON object")
    unknown = next((name for name in fields if name not in model.model_fields), None)
    if unknown is not None:
        raise refuse(unknown[:FIELD_NAME_CHARACTERS_MAX], "is not a field of version 1")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        if first["type"] == "extra_forbidden":
            raise refuse(field, "is not a field of version 1") from None
        raise refuse(field, f"is not acceptable: {first['msg']}") from None
