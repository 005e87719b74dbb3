"""Whether a history of calls on one register could have happened one call after the other. Pure.

A register has a value or none. The checker tries to put the calls in an order in which each takes effect between its
beginning and its end, and in which each call gives what the register's rules say (Wing and Gong, "Testing and Verifying
Concurrent Objects", 1993; the memory of what was tried is Lowe's, 2017). A call whose answer was lost may have taken
effect at any time after its beginning, or never.

Example: put("x") from 0 to 3, a read from 1 to 2 that gives "x", a read from 2.5 to 4 that gives none: no order, since
the second read begins after the first has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """READ gives the value. PUT sets it. PUT_IF sets it where the register has `expected` (None: where it has no
    value), and is refused where it has not. DELETE takes it away.
    """

    READ = "read"
    PUT = "put"
    PUT_IF = "put if"
    DELETE = "delete"


class Outcome(Enum):
    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `value` is what it wrote, or what a read gave."""

    op: Op
    value: str | None
    began_s: float
    ended_s: float
    outcome: Outcome = Outcome.DONE
    expected: str | None = None


def is_linearizable(history: Sequence[Call], initial: str | None = None) -> bool:
    """Whether there is an order of the calls that explains what each of them gave."""
    calls = sorted(
        (call for call in history if not (call.op is Op.READ and call.outcome is Outcome.UNKNOWN)),
        key=lambda call: call.began_s,
    )
    ends = [math.inf if call.outcome is Outcome.UNKNOWN else call.ended_s for call in calls]
    must = sum(1 << index for index, call in enumerate(calls) if call.outcome is not Outcome.UNKNOWN)
    seen: set[tuple[int, str | None]] = set()
    waiting = [(0, initial)]
    while waiting:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        done, value = state
        if done & must == must:
            return True
        left = [index for index in range(len(calls)) if not done >> index & 1]
        first_end_s = min(ends[index] for index in left)
        for index in left:
            if calls[index].began_s > first_end_s:
                break
            for after in _effects(calls[index], value):
                waiting.append((done | 1 << index, after))
    return False


def _effects(call: Call, value: str | None) -> list[str | None]:
    """The register after a call at this value; nothing where the call cannot have given what it gave."""
    if call.op is Op.READ:
        return [value] if call.value == value else []
    if call.op is Op.PUT_IF:
        holds = value == call.expected
        if call.outcome is Outcome.REFUSED:
            return [] if holds else [value]
        if call.outcome is Outcome.DONE:
            return [call.value] if holds else []
        return [call.value] if holds else [value]
    return [None if call.op is Op.DELETE else call.value]
