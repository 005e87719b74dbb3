"""Requests for which no engine is there just now: they wait, and are woken by one that takes their model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from objectcache.adapters.portions import Portions


class WaitingForEngines:
    """The requests that wait, by model. Used on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._portions = Portions()

    async def comes(self, model: str, within_s: float) -> bool:
        """Wait until an engine takes requests for the model again; False where none does within that time."""
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
        """Wake the requests for the models that somebody serves now."""
        for model in [model for model in self._waiting if serves(model)]:
            for coming in self._waiting.pop(model):
                self._portions.add(partial(_wake, coming))


def _wake(coming: asyncio.Future[None]) -> None:
    if not coming.done():
        coming.set_result(None)
