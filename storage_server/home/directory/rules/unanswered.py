"""Journals that the file system cannot read for a moment: what they have is waited for, and not overlooked. Pure.

A disk or a network that does not answer says nothing of the journal. A file of another kind, of another user, with a
lease on it (EAGAIN), or with wrong bytes is its writer's doing, and is not waited for.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

WAITED_S = 30.0
"""A journal that has not been read for longer is left behind, as one that cannot be read."""
TRANSIENT = frozenset(
    {
        errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
        errno.ENOTCONN, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET,
        errno.EREMOTEIO,
    }
)  # fmt: skip


class UnansweredJournals:
    """The writers of such journals, and since when."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def note(self, writer: str, error_number: int, now_s: float) -> None:
        """Note how a read has ended: 0 without an error of the system."""
        if error_number in TRANSIENT:
            self._since_s.setdefault(writer, now_s)
        else:
            self._since_s.pop(writer, None)

    def keep(self, writers: Collection[str]) -> None:
        """Forget all others: their folders are gone."""
        self._since_s = {writer: since_s for writer, since_s in self._since_s.items() if writer in writers}

    def waited_for(self, now_s: float) -> str | None:
        """One of those that may have what a caller asks for; None where all have answered, or are left behind."""
        return next((writer for writer, since_s in self._since_s.items() if now_s - since_s < WAITED_S), None)
