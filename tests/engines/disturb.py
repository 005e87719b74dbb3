"""In the engine's process: hooks in the connector that let a test act at a moment. All that is known here of the
connector's insides by private names is in this module and in `RunningEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.engines.messages import Moment

Reach = Callable[[], None]


class Once:
    """Calls `reach` the first time."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self.has_happened = False

    def __call__(self) -> None:
        if not self.has_happened:
            self.has_happened = True
            self._reach()


@contextmanager
def hooked(moment: Moment, scheduler: Any, worker: Any, reach: Reach) -> Iterator[Once]:
    """While the block runs, `reach` is called when the moment comes, once."""
    once = Once(reach)
    if moment in (Moment.LOOKUP, Moment.MATCHED):
        hook = _lookup(scheduler._scheduler._lookups._client, moment, once)
    elif moment == Moment.LAYER:
        hook = _layer(worker._worker._loads, once)
    else:
        hook = _put(worker._worker._store_client, once)
    owner, name, replacement = hook
    setattr(owner, name, replacement)
    try:
        yield once
    finally:
        delattr(owner, name)


def _lookup(client: Any, moment: Moment, once: Once) -> tuple[Any, str, Callable[..., int]]:
    look_up = client.lookup

    def hook(*arguments: Any, **named: Any) -> int:
        if moment == Moment.LOOKUP:
            once()
        matched = int(look_up(*arguments, **named))
        if moment == Moment.MATCHED and matched:
            once()
        return matched

    return client, "lookup", hook


def _layer(loads: Any, once: Once) -> tuple[Any, str, Callable[..., None]]:
    take = loads._take_layer

    def hook(load: Any) -> None:
        take(load)
        if load.next_layer:
            once()

    return loads, "_take_layer", hook


def _put(client: Any, once: Once) -> tuple[Any, str, Callable[..., None]]:
    put = client.put_chunks

    def hook(*arguments: Any, **named: Any) -> None:
        once()
        put(*arguments, **named)

    return client, "put_chunks", hook
