"""Options with a few values, given as members or by name, and options that users write as JSON or YAML."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

from descriptors.messages import DOWNLINK_MAX, DOWNLINK_MIN
from descriptors.units import parse_bytes

BUCKET = "kv-cache"
"""The bucket of connectors that are told of none."""
BOUNDS = {"max_error", "max_loss"}
"""The bounds that `lossy` may have."""
_log = logging.getLogger(__name__)
_E = TypeVar("_E", bound=Enum)
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


def enum_member(kind: type[_E], value: _E | object, name: str) -> _E:
    """The member of `kind` that `value` is or names. Raises ValueError, which lists the names, for anything else."""
    if isinstance(value, kind):
        return value
    for member in kind:
        if isinstance(value, str) and member.value == value:
            return member
    names = ", ".join(repr(member.value) for member in kind)
    raise ValueError(f"{name} is one of {names}, not {value!r}")


def dataclass_arguments(cls: type[Any], given: Mapping[str, object], enums: Mapping[str, type[Enum]]) -> dict[str, Any]:
    """Arguments for `cls`, a dataclass of plain fields and of `enums`. Raises ValueError for unknown names, for values
    of the wrong type, and for values that an enum does not have. Options in bytes take sizes such as "64MiB".
    """
    kinds = {field.name: str(field.type) for field in fields(cls)}
    if unknown := sorted(set(given) - set(kinds)):
        raise ValueError(f"unknown options: {', '.join(unknown)}")
    return {
        name: enum_member(enums[name], value, name) if name in enums else _plain_value(name, value, kinds[name])
        for name, value in given.items()
    }


def connector_arguments(
    cls: type[Any], given: Mapping[str, object], enums: Mapping[str, type[Enum]], promised: Collection[str]
) -> dict[str, Any]:
    """Arguments for `cls`, the options of a connector. All but the promised ones are in a table `internals`, for tests
    and benches; where they stand beside the others, as in former versions, they hold, and the log says where they
    belong. `lossy` may be the error itself that is accepted, or a table of the bounds `max_error` and `max_loss`.
    Raises ValueError.
    """
    values = dict(given)
    internals = values.pop("internals", {})
    if not isinstance(internals, Mapping):
        raise ValueError(f"internals must be a table, not {internals!r}")
    bound = values.get("lossy")
    if "max_loss" in values:
        raise ValueError(f'max_loss stands in lossy: {{"lossy": {{"max_loss": {values["max_loss"]!r}}}}}')
    if isinstance(bound, Mapping):
        if not bound or not set(bound) <= BOUNDS:
            names = ", ".join(map(str, bound)) or "nothing"
            raise ValueError(f"lossy is a table of {' and '.join(sorted(BOUNDS))}, not of {names}")
        values |= {"lossy": "bounded" if "max_error" in bound else "adaptive", **bound}
    elif isinstance(bound, int | float) and not isinstance(bound, bool):
        values |= {"lossy": "bounded", "max_error": bound}
    elif "max_error" in values:
        _log.warning("the option max_error is the value of lossy now: %r", values["max_error"])
    if misplaced := sorted(set(internals) & set(promised)):
        raise ValueError(f"internals: {', '.join(misplaced)} stands beside internals")
    inner = {field.name for field in fields(cls)} - set(promised) - BOUNDS
    for name in sorted(set(values) & inner):
        _log.warning("the option %s is internals.%s now: no promise holds for it", name, name)
    return dataclass_arguments(cls, {**internals, **values}, enums)


def require_downlink(bytes_per_s: float) -> None:
    """Raises ValueError for a downlink that servers would refuse; 0 is none."""
    if bytes_per_s and not DOWNLINK_MIN <= bytes_per_s <= DOWNLINK_MAX:
        raise ValueError(f"downlink_bytes_per_s must be 0, or from {DOWNLINK_MIN:g} to {DOWNLINK_MAX:g}")


def _plain_value(name: str, value: object, kind: str) -> object:
    if name.endswith("_bytes") and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    elif name.endswith("_bytes") and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} must be of type {kind}, not {value!r}")
    return value
