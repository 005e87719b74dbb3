"""The storage servers of a cluster at one moment, and the form in which a view of them is told. Pure.

A view is one (cluster id, number): whoever changes the members makes the next number. Every call of a gateway names the
view that it was made under, and a storage server that knows a later one refuses it, so that no two of them place a key
by different members for long.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MEMBERS_MAX = 1_024
WEIGHT_MAX = 1e9
NUMBER_MAX = (1 << 63) - 1
VIEW_HEADER = "x-objectcache-view"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_ENDPOINT = re.compile(r"(https?://[^\s/?#@]{1,255}|unix:/[^\s]{1,255})\Z")
_VIEW_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):([0-9]{1,19})\Z")


class ClusterError(ValueError):
    """A member or a view that breaks a rule; the message names the field."""


@dataclass(frozen=True, slots=True)
class Member:
    """One storage server. Gateways reach it at `endpoint`; `weight` is its fraction of the keys, in any unit that all
    members share (its tier's bytes, say). A member that drains is given no keys, but answers for those that it has.

    Raises ClusterError.
    """

    name: str
    endpoint: str
    weight: float = 1.0
    is_draining: bool = False

    def __post_init__(self) -> None:
        require_name(self.name, "name")
        if not isinstance(self.endpoint, str) or not _ENDPOINT.match(self.endpoint):
            raise ClusterError(f"endpoint must be http://HOST:PORT, https://HOST:PORT or unix:/PATH: {self.endpoint!r}")
        if type(self.weight) not in (int, float) or not 0 < self.weight <= WEIGHT_MAX:
            raise ClusterError(f"weight must be more than 0 and at most {WEIGHT_MAX:g}, not {self.weight!r}")

    @property
    def id(self) -> str:
        """The member at its endpoint: a server elsewhere that has taken the name over has another id."""
        return f"{self.name}.{hashlib.blake2b(self.endpoint.encode(), digest_size=6).hexdigest()}"


@dataclass(frozen=True, slots=True)
class View:
    """The members of a cluster, by name. Raises ClusterError where two share a name."""

    cluster_id: str
    number: int
    members: tuple[Member, ...] = ()
    _by_name: Mapping[str, Member] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_name(self.cluster_id, "cluster_id")
        if type(self.number) is not int or not 0 <= self.number <= NUMBER_MAX:
            raise ClusterError(f"number must be an integer from 0 to {NUMBER_MAX}, not {self.number!r}")
        if len(self.members) > MEMBERS_MAX:
            raise ClusterError(f"a cluster has at most {MEMBERS_MAX} members, not {len(self.members)}")
        members = tuple(sorted(self.members, key=lambda member: member.name))
        by_name = {member.name: member for member in members}
        if len(by_name) < len(members):
            raise ClusterError("two members have one name")
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "_by_name", by_name)

    @property
    def id(self) -> ViewId:
        """The name of the view, which every call carries that is made under it."""
        return ViewId(self.cluster_id, self.number)

    def member(self, name: str) -> Member | None:
        """The member of this name; None where there is none."""
        return self._by_name.get(name)

    def by_id(self, member_id: str) -> Member | None:
        """The member of this id; None where there is none."""
        member = self.member(member_id.rpartition(".")[0])
        return member if member is not None and member.id == member_id else None

    @property
    def placed(self) -> tuple[Member, ...]:
        """The members that are given keys: those that do not drain, or all where every one drains."""
        return tuple(member for member in self.members if not member.is_draining) or self.members


@dataclass(frozen=True, slots=True)
class ViewId:
    """The name of a view: of its cluster, and its number."""

    cluster_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.cluster_id}:{self.number}"

    def is_before(self, other: ViewId) -> bool:
        """Whether the other view is of the same cluster, and later."""
        return self.cluster_id == other.cluster_id and self.number < other.number


def parse_view_id(text: str) -> ViewId:
    """The inverse of `str(view_id)`. Raises ClusterError."""
    match = _VIEW_ID.match(text)
    if match is None or int(match[2]) > NUMBER_MAX:
        raise ClusterError(f"{VIEW_HEADER} must be CLUSTER:NUMBER, not {text[:80]!r}")
    return ViewId(match[1], int(match[2]))


def require_name(value: object, name: str) -> str:
    """A name of a member or a cluster is 1 to 64 of A-Z a-z 0-9 . _ - and begins with a letter or digit. Raises
    ClusterError.
    """
    if not isinstance(value, str) or not _NAME.match(value):
        raise ClusterError(f"{name} must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit: {value!r}")
    return value


def member_fields(member: Member) -> dict[str, object]:
    """The member as JSON has it."""
    return {
        "name": member.name,
        "endpoint": member.endpoint,
        "weight": member.weight,
        "is_draining": member.is_draining,
    }


def member_from_fields(fields: Mapping[str, object]) -> Member:
    """The inverse. Fields that are not known are refused. Raises ClusterError."""
    unknown = set(fields) - {"name", "endpoint", "weight", "is_draining"}
    if unknown:
        raise ClusterError(f"{sorted(unknown)[0]}: no such field of a member")
    if not isinstance(fields.get("is_draining", False), bool):
        raise ClusterError("is_draining must be true or false")
    try:
        return Member(**fields)  # type: ignore[arg-type]
    except TypeError:
        raise ClusterError("a member needs name and endpoint") from None


def changed_members(before: View, after: View) -> Iterable[Member]:
    """The members that are in one of the views alone, or differ."""
    return set(before.members) ^ set(after.members)
