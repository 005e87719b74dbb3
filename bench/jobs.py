"""What the S3 load is told to do and what it answers: values that travel as lines of JSON. Pure."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum

from bench.objects import Group

BUCKET = "bench"
REGION = "us-east-1"
REQUEST_TIMEOUT_S = 300
UNLIMITED_S = 1e9
LIST_NBYTES = 16
"""Size of the objects that are listed."""


class Kind(Enum):
    """One piece of work. RECEIVE is a GET whose body is received into memory of ours; RAW is no HTTP at all."""

    PUT = "put"
    GET = "get"
    LIST = "list"
    DELETE = "delete"
    RECEIVE = "receive"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class Target:
    """Where the requests go. For RAW the port of a sender, as the URL `tcp://HOST:PORT`."""

    url: str
    access_key: str
    secret_key: str


@dataclass(frozen=True, slots=True)
class Job:
    """Requests `first`, `first + stride`, … until `count_max` of them are done or `seconds` have passed, but no fewer
    than one for each in flight. Reads cycle through `population` objects; writes never name a key twice.
    """

    kind: Kind
    target: Target
    group: Group
    nbytes: int
    in_flight: int
    count_max: int
    seconds: float
    first: int = 0
    stride: int = 1
    population: int | None = None
    is_signed: bool = True

    def number(self, index: int) -> int:
        """The object of request `index` of this job."""
        number = self.first + index * self.stride
        return number if self.population is None else number % self.population

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps({**asdict(self), "kind": self.kind.value, "group": self.group.value})

    @staticmethod
    def from_line(line: str) -> Job:
        """The inverse of `to_line`."""
        fields = json.loads(line)
        fields |= {"kind": Kind(fields["kind"]), "group": Group(fields["group"]), "target": Target(**fields["target"])}
        return Job(**fields)

    def again(self, kind: Kind, start: int, count: int, in_flight: int) -> Job:
        """Other work on `count` of this job's objects, from its `start`th on, however long it takes."""
        return replace(
            self,
            kind=kind,
            in_flight=min(in_flight, count),
            count_max=count,
            seconds=UNLIMITED_S,
            first=self.first + start * self.stride,
        )

    def divided(self, parts: int) -> list[Job]:
        """The same work for several processes, none of which gets nothing to do."""
        parts = min(parts, self.in_flight, self.count_max)
        return [
            replace(
                self,
                in_flight=_share(self.in_flight, parts, part),
                count_max=_share(self.count_max, parts, part),
                first=self.first + part * self.stride,
                stride=self.stride * parts,
            )
            for part in range(parts)
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job came to: `count` requests (for a list, pages) and `items` objects between two monotonic times.

    `problem` is the first failed request or wrong body; figures beside a problem are worth nothing.
    """

    started_s: float
    ended_s: float
    count: int
    items: int
    latencies_s: array[float]
    cpu_s: float
    problem: str | None = None

    @property
    def duration_s(self) -> float:
        """From the first request's start to the last one's end."""
        return self.ended_s - self.started_s

    def to_line(self) -> str:
        """One line of JSON; latencies are packed."""
        fields = {name: getattr(self, name) for name in ("started_s", "ended_s", "count", "items", "cpu_s", "problem")}
        return json.dumps({**fields, "latencies_s": base64.b64encode(self.latencies_s.tobytes()).decode()})

    @staticmethod
    def from_line(line: str) -> Outcome:
        """The inverse of `to_line`."""
        fields = json.loads(line)
        fields["latencies_s"] = array("d", base64.b64decode(fields["latencies_s"]))
        return Outcome(**fields)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Several processes' outcomes as one."""
    latencies = array("d")
    for outcome in outcomes:
        latencies.extend(outcome.latencies_s)
    return Outcome(
        min(outcome.started_s for outcome in outcomes),
        max(outcome.ended_s for outcome in outcomes),
        sum(outcome.count for outcome in outcomes),
        sum(outcome.items for outcome in outcomes),
        latencies,
        sum(outcome.cpu_s for outcome in outcomes),
        next((outcome.problem for outcome in outcomes if outcome.problem), None),
    )


def _share(total: int, parts: int, part: int) -> int:
    return total // parts + (part < total % parts)
