"""Lookups of chunks that the cache has not: which of them the home has, as far as it answers in time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from descriptors.errors import CallerError, ObjectCacheError, ServerError
from objectcache.adapters.breaker import Breakers
from objectcache.adapters.caller import CALLER, CallerTurns
from objectcache.adapters.rare_warnings import RareWarnings
from storage_server.home.rules.health import SCOPES_MAX, Scope
from storage_server.home.service import HomeObjects

ASKS_MAX = 16
LOOKUPS_MAX, LOOKUPS_EACH_MAX = 4, 2
"""So many lookups of single keys ask the home at once, and of one caller: each has ASKS_MAX requests under way."""
ASKED_MAX = 1_024
"""A lookup of single keys asks upstream about so many at most: each is a request there."""
HOME_ANSWERS_S = 1.5
"""A lookup asks upstream for so long, and then answers what it knows: connectors wait for 2 s."""
CUT_OFF_S = 2.0
"""Where upstream has not answered, later lookups of this caller in this bucket do not ask it for so long."""
_log = logging.getLogger(__name__)


class HomeLookups:
    """Asks `objects`. A home that does not answer CALLER about a bucket is asked nothing of that for CUT_OFF_S. Others
    are not told: the home may be too busy for the bucket alone, or the caller's prefix too long.
    """

    def __init__(self, objects: HomeObjects) -> None:
        self._objects = objects
        self._cut_offs = Breakers[Scope](1, CUT_OFF_S, CUT_OFF_S, SCOPES_MAX)
        self._turns = CallerTurns(LOOKUPS_MAX, LOOKUPS_EACH_MAX)
        self._warnings = RareWarnings(_log)

    def is_cut_off(self, bucket: str) -> bool:
        """Whether the home has not answered CALLER about this bucket of late."""
        return self._cut_offs.is_open((CALLER.get(), bucket), time.monotonic())

    async def count(self, bucket: str, keys: Sequence[str], known: int) -> int:
        """How many leading keys there are, where the first `known` are; so many of them as the home answers for. Where
        a prefix is whole, as prefixes are, a binary search finds its end in O(log N) requests.
        """
        low, high, step, is_bounded = known, len(keys), 1, False
        asked_s = time.monotonic()
        if known == len(keys) or self.is_cut_off(bucket):
            return known
        try:
            async with asyncio.timeout(HOME_ANSWERS_S):
                while low < high:
                    index = (low + high) // 2 if is_bounded else min(low + step, high) - 1
                    if await self._objects.has_object(bucket, keys[index], asked_s):
                        low, step = index + 1, step * 2
                    else:
                        high, is_bounded = index, True
                if not low:
                    await self._objects.require_bucket(bucket)
        except (ServerError, TimeoutError) as error:
            self._cut_off(bucket, error)
        return low

    def _cut_off(self, bucket: str, error: Exception) -> None:
        problem = error.message if isinstance(error, ObjectCacheError) else f"no answer in {HOME_ANSWERS_S} s"
        warning = "for %.0f s a caller's lookups in %.300r count what is cached: upstream does not answer: %.300r"
        self._warnings.warn(warning, CUT_OFF_S, bucket, problem)
        self._cut_offs.failed((CALLER.get(), bucket), time.monotonic())

    async def each(self, bucket: str, keys: Sequence[str]) -> tuple[list[int], bool]:
        """The positions of the keys that the home says it has, in the time of a lookup, and whether it was asked about
        all of them.
        """
        if not keys or self.is_cut_off(bucket):
            return [], not keys
        there: list[int] = []
        has_turn, answered_count = False, 0
        failures: list[ObjectCacheError] = []
        left, asked_s = iter(enumerate(keys[:ASKED_MAX])), time.monotonic()

        async def ask() -> None:
            nonlocal answered_count
            try:
                for at, key in left:
                    if await self._objects.has_object(bucket, key, asked_s):
                        there.append(at)
                    answered_count += 1
            except ObjectCacheError as error:
                failures.append(error)

        try:
            async with asyncio.timeout(HOME_ANSWERS_S), self._turns.turn():
                has_turn = True
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(ASKS_MAX, len(keys))):
                        tasks.create_task(ask())
                if not there and not failures:
                    await self._objects.require_bucket(bucket)
        except TimeoutError as error:
            if has_turn and not answered_count:
                self._cut_off(bucket, error)
            return there, False
        except ServerError as error:
            failures.append(error)
        for failure in failures:
            if isinstance(failure, CallerError):
                raise failure
        if failures:
            self._cut_off(bucket, failures[0])
        return there, not failures and len(keys) <= ASKED_MAX
