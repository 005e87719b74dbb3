"""In the engine's process: hooks in the connector that let a test act at a moment. All that is known here of the
connector's insides by private names is in this module and in `RunningEngine`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nixl_client.connectors.vllm.blocks import Blocks
from nixl_client.connectors.vllm.loads_ahead import LoadsAhead
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
        loads = worker._worker._loads
        hook = _layer(loads._loads if isinstance(loads, LoadsAhead) else loads, once)
    else:
        hook = _put(worker._worker._store_client, once)
    owner, name, replacement = hook
    setattr(owner, name, replacement)
    try:
        yield once
    finally:
        delattr(owner, name)


@contextmanager
def hooked_tier(moment: Moment, _: Any, traffic: Any, reach: Reach) -> Iterator[Once]:
    """`hooked` for the tier: before a lookup, after one that found something, in a load, before a put."""
    once = Once(reach)
    if moment in (Moment.LOOKUP, Moment.MATCHED):
        hook = _presence(traffic.lookups, moment, once)
    elif moment == Moment.LAYER:
        hook = _fetch(traffic._loads, once)
    else:
        hook = _put(traffic._stores, once)
    owner, name, replacement = hook
    setattr(owner, name, replacement)
    try:
        yield once
    finally:
        delattr(owner, name)


def watched(worker: Any) -> dict[str, str]:
    """Digests, by key, of the chunks of all loads from now on, once they are in their blocks."""
    loads = worker._loads._loads if isinstance(worker._loads, LoadsAhead) else worker._loads
    digests: dict[str, str] = {}
    count = loads._count

    def hook(load: Any, **named: Any) -> None:
        count(load, **named)
        span, chunk_tokens = load.job.chunk_range, loads._grid.chunk_tokens
        blocks, tokens = Blocks(span.blocks), span.chunk_count * chunk_tokens
        parts = [[layer.read(blocks, 0, tokens, part) for part in (0, 1)] for layer in loads._layers]
        for index, key in enumerate(load.job.keys[loads._rank]):
            digest = hashlib.sha256()
            for states in itertools.chain.from_iterable(parts):
                digest.update(states[index * chunk_tokens : (index + 1) * chunk_tokens].contiguous().numpy().tobytes())
            digests[key] = digest.hexdigest()

    loads._count = hook
    return digests


def overlap_steps() -> None:
    """Have vLLM schedule asynchronously: only its platform for CPUs switches that off, the scheduler does not mind."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def hook(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(hook)


def _presence(client: Any, moment: Moment, once: Once) -> tuple[Any, str, Callable[..., Any]]:
    present = client.present

    def hook(*arguments: Any, **named: Any) -> Any:
        if moment == Moment.LOOKUP:
            once()
        found = present(*arguments, **named)
        if moment == Moment.MATCHED and any(found):
            once()
        return found

    return client, "present", hook


def _fetch(client: Any, once: Once) -> tuple[Any, str, Callable[..., Any]]:
    fetch = client.fetch

    def hook(*arguments: Any, **named: Any) -> Any:
        begun = fetch(*arguments, **named)
        begun.wait_admitted(60)
        once()
        return begun

    return client, "fetch", hook


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
