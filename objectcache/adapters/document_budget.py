"""DocumentBudget: bounds the memory of request documents, in all and for each access key. Pure state.

One key has at most half of what others leave: the first one half of all, the next one half of the rest. So several keys
together keep nobody out either.

A document is a body that is parsed as a whole (a descriptor, a lookup, S3's XML). Its bytes count from their arrival
until the document has been parsed. So bytes that a client announces but does not send take nothing from the budget.
"""

from __future__ import annotations

from collections import Counter

from descriptors.errors import ErrorCode, ServerError


class DocumentBudget:
    """At most `total_bytes` for all keys together, and `key_bytes` for one key."""

    def __init__(self, total_bytes: int, key_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._key_bytes = key_bytes
        self._held: Counter[str] = Counter()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The bytes that count now, of all keys."""
        return self._held_bytes

    def take(self, access_key: str, nbytes: int) -> None:
        """Count bytes that have arrived. Raises ServerError(SlowDown), and counts nothing, where a
        bound is exceeded.
        """
        held_bytes = self._held.get(access_key, 0)
        others_bytes = self._held_bytes - held_bytes
        left_bytes = self._total_bytes - others_bytes
        if held_bytes + nbytes > self._key_bytes:
            whose = "this access key's requests"
        elif held_bytes + nbytes > (left_bytes // 2 if others_bytes else left_bytes):
            whose = "all requests together"
        else:
            self._held[access_key] += nbytes
            self._held_bytes += nbytes
            return
        problem = f"the documents of {whose} use all the memory they may have; send this one again later"
        raise ServerError(ErrorCode.SLOW_DOWN, problem, field="body", retryable=True)

    def give_back(self, access_key: str, nbytes: int) -> None:
        """Stop counting bytes that `take` counted."""
        self._held_bytes -= nbytes
        self._held[access_key] -= nbytes
        if not self._held[access_key]:
            del self._held[access_key]
