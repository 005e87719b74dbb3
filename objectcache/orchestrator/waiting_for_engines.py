"""Requests for which no engine is there just now: they wait, and are woken when one takes their model, or none will.

Thousands may wait for one model, and a thousand engines may change at once. So each change has one look at each model
that the engine serves, and wakes its requests only where they have nothing to wait for any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from objectcache.adapters.portions import Portions


class WaitingForEngines:
    """The requests that wait, by model. `may_come` says whether there is something to wait for: no engine takes
    requests for a model now, and one may do so soon. Used on one event loop.
    """

    def __init__(self, may_come: Callable[[str], bool]) -> None:
        self._may_come = may_come
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._looked_at: set[str] = set()
        """The models that are to be looked at again."""
        self._portions = Portions()

    async def comes(self, model: str, within_s: float) -> bool:
        """Wait until an engine takes requests for the model again, or none will; False where neither is so in time."""
        coming = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(model, {})[coming] = None
        try:
            async with asyncio.timeout(within_s):
                await coming
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(model)
            if waiting is not None:
                waiting.pop(coming, None)
                if not waiting:
                    del self._waiting[model]
        return True

    def wake(self, serves: Callable[[str], bool]) -> None:
        """An engine has changed: look at the models that it serves, or served."""
        for model in [each for each in self._waiting if each not in self._looked_at and serves(each)]:
            self._looked_at.add(model)
            self._portions.add(partial(self._look_at, model))

    def _look_at(self, model: str) -> None:
        self._looked_at.discard(model)
        if model in self._waiting and not self._may_come(model):
            for coming in self._waiting.pop(model):
                self._portions.add(partial(_wake, coming))


def _wake(coming: asyncio.Future[None]) -> None:
    if not coming.done():
        coming.set_result(None)
