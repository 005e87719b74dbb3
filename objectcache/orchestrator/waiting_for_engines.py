"""Requests for which no engine is there just now: they wait, and are woken by one that takes their model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

WOKEN_MAX = 64


class WaitingForEngines:
    """The requests that wait, by model. Used on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._woken: deque[asyncio.Future[None]] = deque()
        self._is_waking = False

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
            self._woken.extend(self._waiting.pop(model))
        self._wake_some()

    def _wake_some(self) -> None:
        """Thousands may wait, and each has some work to do at once: a portion goes on in one pass of the loop."""
        for _ in range(min(WOKEN_MAX, len(self._woken))):
            coming = self._woken.popleft()
            if not coming.done():
                coming.set_result(None)
        if self._woken and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_more)

    def _wake_more(self) -> None:
        self._is_waking = False
        self._wake_some()
