"""What a key may show, decided from what was sent and what was answered. Pure; the harness's clock is a counter.

A write that was answered took effect between its request and its answer; one that was not may take effect at any time
from its request until the server is dead, or never. So a read may show write W unless a later write is sure to have
replaced it: one that began after W's answer, and was answered before the read began.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.faults.crash.versions import Piece, Version

Shown = Version | None
"""A state of a key; None where there is no object."""


@dataclass(slots=True)
class Write:
    """One operation's effect on one key. `ended` is infinite while, and when, no answer has come."""

    result: Shown
    began: float
    ended: float = math.inf


@dataclass(slots=True)
class History:
    """The writes of one key since its state was last certain. `writes[0]` is that state."""

    writes: list[Write] = field(default_factory=lambda: [Write(None, -1, -1)])

    def allowed(self, began: float, ended: float) -> list[Shown]:
        """Every state a read sent at `began` and answered at `ended` may show, the latest first."""
        sure = [write for write in self.writes if write.ended < began]
        replaced_until = max(write.began for write in sure) if sure else -math.inf
        shown: list[Shown] = []
        for write in reversed(self.writes):
            if write.began < ended and write.ended >= replaced_until and write.result not in shown:
                shown.append(write.result)
        return shown

    @property
    def is_sure(self) -> bool:
        """Whether every write has been answered."""
        return all(write.ended < math.inf for write in self.writes)

    @property
    def last(self) -> Shown:
        """The state after the write begun last: what shows, for a key only one client writes."""
        return self.writes[-1].result

    def settle(self, shown: Shown) -> None:
        """From here on the state is certain."""
        self.writes = [Write(shown, -1, -1)]


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part as it was sent."""

    piece: Piece
    etag: str


@dataclass(slots=True)
class Upload:
    """A multipart upload. `parts` has every state each part number may show; `ending` is the completion (its version)
    or abort (None) that was sent, `is_ended` whether that was answered.
    """

    key: str
    upload_id: str
    metadata: dict[str, str]
    tags: dict[str, str]
    parts: dict[int, list[SentPart | None]] = field(default_factory=dict)
    is_ending: bool = False
    is_ended: bool = False
    ending: Version | None = None

    def sure_parts(self) -> dict[int, SentPart]:
        """Part numbers with only one state possible, which is a part."""
        return {number: only[0] for number, only in sorted(self.parts.items()) if len(only) == 1 and only[0]}
