"""Kinds of values in the config file."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from descriptors.units import parse_bytes

_BITS = re.compile(r"(\d{1,20}(?:\.\d{0,20})?) {0,4}([kKMGT]?)(?:bps|bit/s|bits/s|b/s)")


class NoServerError(Exception):
    """Nobody, or somebody else, answers at an address. The message says what was asked, and what to look at."""


class ConfigError(Exception):
    """A configuration that cannot be used; the message says which part."""


class Model(BaseModel):
    """A table; names that are not known are refused. ABOUT is what the reference says of it."""

    ABOUT: ClassVar[str] = ""
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def shown(example: object, description: str = "", **bounds: Any) -> Any:
    """A key as the reference shows it: with an example, the default where there is one, and what it means."""
    return Field(description=description, examples=[example], **bounds)


def _size(value: object) -> object:
    """A size as people write it: 200e9 and "200GB" are whole numbers of bytes."""
    if isinstance(value, str):
        return parse_bytes(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Size = Annotated[int, BeforeValidator(_size)]
"""A number of bytes."""


def _rate(value: object) -> object:
    """A rate is written as a size is; one in bits is told apart, because it would be eight times as much."""
    found = _BITS.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        bits = parse_bytes(f"{found[1]}{found[2]}")
        raise ValueError(f"{value!r} counts bits; rates are in bytes a second: {bits / 8:.6g}")
    return _size(value)


Rate = Annotated[float, BeforeValidator(_rate)]
"""Bytes in a second, which people write as they write sizes."""
