"""The requests at one engine that are told when it is ejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from objectcache.adapters.portions import Portions


class EngineWatchers:
    """Calls to make when the engine is gone. Used on one event loop."""

    def __init__(self) -> None:
        self._calls: set[Callable[[], None]] = set()
        self._portions = Portions()

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def watched(self, on_gone: Callable[[], None]) -> Iterator[None]:
        """Have `on_gone` called when the engine is ejected within the block."""
        self._calls.add(on_gone)
        try:
            yield
        finally:
            self._calls.discard(on_gone)

    def tell(self) -> None:
        """The engine is ejected. Thousands may have to be told, each of which then asks for another engine."""
        for on_gone in tuple(self._calls):
            self._portions.add(partial(self._tell, on_gone))

    def _tell(self, on_gone: Callable[[], None]) -> None:
        if on_gone in self._calls:
            on_gone()
