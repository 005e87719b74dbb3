"""Kinds of values in the config file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from descriptors.units import parse_bytes


class NoServerError(Exception):
    """Nobody, or somebody else, answers at an address. The message says what was asked, and what to look at."""


class ConfigError(Exception):
    """A configuration that cannot be used; the message says which part."""


class Model(BaseModel):
    """A table; names that are not known are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _size(value: object) -> object:
    """A size as people write it: 200e9 and "200GB" are whole numbers of bytes."""
    if isinstance(value, str):
        return parse_bytes(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Size = Annotated[int, BeforeValidator(_size)]
"""A number of bytes."""
Rate = Annotated[float, BeforeValidator(_size)]
"""Bytes in a second, which people write as they write sizes."""
