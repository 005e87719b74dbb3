"""How much of a journal is waited for. Pure: times are given, in seconds of a steady clock.

A call waits until the journals are read as far as they had come when it began. A neighbour in the directory could write
more than can be read, and let all calls wait for ever. So each writer has a share, which comes again with time. A
writer that has used its share up is late: nobody waits for it until it is read to its end.

A server keeps to three quarters of that share, and its callers have equal parts of it once half is used up: else one
caller, who tags an object of thousands of parts again and again, would make what all others write here late elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from descriptors.units import MIB

ROWS_MAX = 200_000
ROWS_PER_S = 10_000.0
"""Each record is a row, and each of its bodies."""
BYTES_MAX = 64 * MIB
BYTES_PER_S = 8.0 * MIB
"""A server with objects of 1 MiB writes 10,000 rows and 3 MiB a second where it stores 5 GiB a second. About 30,000
records of one body, so 60,000 rows, can be read in a second (measured by hand).
"""
ALL = 4
"""All writers together have so many shares."""
WRITTEN = 0.75
"""A server itself writes so much of its share."""
REGAINED_EVERY_S = 0.1
"""All callers are looked at so often: there may be thousands."""


@dataclass(slots=True)
class _Spent:
    rows: float = 0.0
    nbytes: float = 0.0
    at_s: float = 0.0


class Shares:
    """The shares of all writers."""

    def __init__(self) -> None:
        self._all = _Spent()
        self._spent: dict[str, _Spent] = {}

    def spend(self, writer: str, rows: int, nbytes: int, now_s: float) -> None:
        """Note that so much of a writer's journal was waited for."""
        for spent in (self._all, self._spent.setdefault(writer, _Spent())):
            _regain(spent, now_s, ALL if spent is self._all else 1)
            spent.rows += rows
            spent.nbytes += nbytes

    def keep(self, writers: Collection[str]) -> None:
        """Forget all others: their folders are gone."""
        if len(self._spent) > len(writers):
            self._spent = {writer: spent for writer, spent in self._spent.items() if writer in writers}

    def is_waited_for(self, writer: str, now_s: float) -> bool:
        """Whether more of a writer's journal may be waited for."""
        return _has_more(self._all, now_s, ALL) and (
            writer not in self._spent or _has_more(self._spent[writer], now_s, 1)
        )


class WrittenShares:
    """The parts that the callers of a server have of the share of its journal."""

    def __init__(self) -> None:
        self._all = _Spent()
        self._spent: dict[str, _Spent] = {}

    def may_write(self, caller: str, now_s: float) -> bool:
        """Whether a caller may write more now."""
        self._regain(now_s)
        count = len(self._spent) + (caller not in self._spent)
        own = self._spent.get(caller, _Spent())
        return _is_below(self._all, WRITTEN / 2) or _is_below(own, WRITTEN / 2 / count)

    def spend(self, caller: str, rows: int, nbytes: int, now_s: float) -> None:
        """Note that a caller writes so much."""
        self._regain(now_s)
        for spent in (self._all, self._spent.setdefault(caller, _Spent(at_s=now_s))):
            spent.rows += rows
            spent.nbytes += nbytes

    def _regain(self, now_s: float) -> None:
        if now_s - self._all.at_s < REGAINED_EVERY_S:
            return
        _regain(self._all, now_s, WRITTEN)
        for spent in self._spent.values():
            _regain(spent, now_s, WRITTEN / len(self._spent))
        self._spent = {caller: spent for caller, spent in self._spent.items() if spent.rows or spent.nbytes}


def _regain(spent: _Spent, now_s: float, count: float) -> None:
    passed_s = max(0.0, now_s - spent.at_s)
    spent.rows = max(0.0, spent.rows - passed_s * ROWS_PER_S * count)
    spent.nbytes = max(0.0, spent.nbytes - passed_s * BYTES_PER_S * count)
    spent.at_s = max(spent.at_s, now_s)


def _has_more(spent: _Spent, now_s: float, count: int) -> bool:
    _regain(spent, now_s, count)
    return _is_below(spent, count)


def _is_below(spent: _Spent, count: float) -> bool:
    return spent.rows < ROWS_MAX * count and spent.nbytes < BYTES_MAX * count
