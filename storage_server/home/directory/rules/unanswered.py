"""Journals that the file system cannot read for a moment: what they have is waited for, and not overlooked. Pure.

A disk or a network that does not answer says nothing of the journal. A file of another kind, of another user, with a
lease on it (EAGAIN), or with wrong bytes is its writer's doing, and is not waited for.

Each journal is waited for as long as it has time left. The time comes back slowly: a file system that hangs and answers
in turns would else keep all callers waiting for ever.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

WAITED_S = 30.0
"""A journal that has not been read for longer is left behind, as one that cannot be read."""
REGAINED = 1 / 60
"""A journal that answers has so much of a second back after each."""
CLAIM = 0.5
"""A journal that was late is waited for again when it has this part of its time."""
TRANSIENT = frozenset(
    {
        errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
        errno.ENOTCONN, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET,
        errno.EREMOTEIO,
    }
)  # fmt: skip


class UnansweredJournals:
    """The writers of such journals, and since when; and what they have spent of the time for which they are waited."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._spent: dict[str, tuple[float, float]] = {}
        """By writers: how much was spent at a time."""

    def note(self, writer: str, error_number: int, now_s: float, since_s: float | None = None) -> None:
        """Note how a read has ended: 0 without an error of the system. It was begun at `since_s`, if it hangs."""
        if error_number in TRANSIENT:
            self._since_s.setdefault(writer, now_s if since_s is None else since_s)
        elif writer in self._since_s:
            since_s = self._since_s.pop(writer)
            spent_s = min(WAITED_S, self._spent_s(writer, since_s) + now_s - since_s)
            self._spent[writer] = spent_s, now_s

    def keep(self, writers: Collection[str]) -> None:
        """Forget all others: their folders are gone."""
        self._since_s = {writer: since_s for writer, since_s in self._since_s.items() if writer in writers}
        self._spent = {writer: spent for writer, spent in self._spent.items() if writer in writers}

    def waited_for(self, now_s: float) -> str | None:
        """One of those that may have what a caller asks for; None where all have answered, or are left behind."""
        for writer, since_s in self._since_s.items():
            if now_s - since_s + self._spent_s(writer, since_s) < WAITED_S:
                return writer
        return None

    def has_claim(self, writer: str, now_s: float) -> bool:
        """Whether to wait for a journal that answers: it may hang the next moment."""
        return self._spent_s(writer, now_s) <= CLAIM * WAITED_S

    def _spent_s(self, writer: str, now_s: float) -> float:
        spent_s, noted_s = self._spent.get(writer, (0.0, now_s))
        return max(0.0, spent_s - REGAINED * (now_s - noted_s))
