"""What the clients of one data directory share, over all its rounds."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Final

from tests.faults.crash.journal import Journal
from tests.faults.crash.model import Upload

BUCKET: Final = "crash"
WRITERS: Final = 4
OWN_KEYS: Final = 12
CONTESTED_KEYS: Final = ("hot/1", "hot/2", "hot/3 with space")
ENDED_UPLOADS_MAX: Final = 6


@dataclass(slots=True)
class World:
    """`uploads` are known to exist or may; `ended` are upload ids that must not work. `begun` are uploads whose
    creation was not answered, by key. `killed` is set before the server is.
    """

    seed: int
    journal: Journal = field(default_factory=Journal)
    uploads: dict[int, list[Upload]] = field(default_factory=lambda: {index: [] for index in range(WRITERS)})
    ended: list[Upload] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    killed: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    _seeds: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_seed(self) -> int:
        """For bytes nobody has had."""
        return self.common_seed + next(self._seeds)

    @property
    def common_seed(self) -> int:
        """For bytes that others of the same length have, too."""
        return self.seed << 24

    def end(self, writer: int, upload: Upload) -> None:
        """This upload is over: its id must not work any more."""
        upload.is_ended = True
        self.uploads[writer] = [one for one in self.uploads[writer] if one is not upload]
        self.ended = [*self.ended, upload][-ENDED_UPLOADS_MAX:]


def own_keys(writer: int) -> list[str]:
    """Keys only this writer writes; some with bytes that clients and lists must escape."""
    return [f"w{writer}/{index:02}" + ("", " +ä&", "/deep")[index % 3] for index in range(OWN_KEYS)]
