"""One engine's blocks: where its events come from, and the names under which the index has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.orchestrator.events_feed import EventsFeed, FeedLog, FeedStatus, FeedTurns
from objectcache.orchestrator.rules.kv_events import KnownBatch
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import RANK_MARK

Source = tuple[int, str, str | None, str]
"""A rank's number, and the endpoint, the replay endpoint and the topic of its events."""


class EngineBlocks:
    """The blocks of an engine of this name, by the events of its data-parallel ranks, or by what is expected only."""

    def __init__(
        self,
        name: str,
        index: PrefixIndex,
        known: Mapping[str, KnownBatch] | None,
        log: FeedLog | None,
        turns: FeedTurns | None,
        warnings: RareWarnings | None = None,
    ) -> None:
        """`known` are the last batches of the ranks that are in the index, by their names there. `turns` are those of
        all engines' events, and `warnings` those of this engine.
        """
        self._name = name
        self._index = index
        self._known = known or {}
        self._log = log
        self._turns = turns or FeedTurns()
        self._warnings = warnings
        self.feeds: dict[str, EventsFeed] = {}
        """By the names under which the index knows the engine's data-parallel ranks."""
        self.ranks: dict[str, int] = {}
        """The ranks by the same names."""
        self._listeners: list[asyncio.Task[None]] = []
        self._sources: Sequence[Source] | None = None
        self._has_left = False
        index.add_engine(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the ranks in the index, in order; none where the engine has left."""
        return () if self._has_left else tuple(self.feeds) or (self._name,)

    @property
    def is_live(self) -> bool:
        """Whether events say all that the engine holds."""
        return bool(self.feeds) and all(feed.status is FeedStatus.LIVE for feed in self.feeds.values())

    @property
    def block_tokens(self) -> int | None:
        """The tokens of a block, by the events; None before the first."""
        known = (self._index.block_tokens(name) for name in self.names)
        return next((each for each in known if each is not None), None)

    def found(self, sources: Sequence[Source]) -> None:
        """The engine says that its events are there: listen where that is new."""
        if sources == self._sources or not (sources or self._sources):
            return
        is_first, self._sources = self._sources is None, sources
        if not is_first:
            self._known = {}
        self.listen(sources)

    def listen(self, sources: Sequence[Source]) -> None:
        """Listen to these ranks, and to no others any more."""
        for task in self._listeners:
            task.cancel()
        names = {index_name(self._name, rank) for rank, *_ in sources}
        for name in self._index.names_of(self._name):
            if name in self.feeds or name not in names:
                self._index.clear(name)
                if name != self._name:
                    self._index.remove_engine(name)
                if self._log is not None:  # a start would take over what is written down of it
                    self._log.cleared(name)
        self.feeds, self._listeners, self.ranks = {}, [], {}
        for rank, events, replay, topic in sources:
            name = index_name(self._name, rank)
            self._index.add_engine(name, len(sources))
            known = self._known.get(name)
            feed = EventsFeed(
                engine=name,
                index=self._index,
                events=events,
                replay=replay,
                topic=topic,
                known=known,
                log=self._log,
                turns=self._turns,
                warnings=self._warnings,
            )
            self.feeds[name], self.ranks[name] = feed, rank
            self._listeners.append(asyncio.create_task(feed.run()))

    async def tend(self) -> None:
        """Do what is due now and then."""
        for feed in self.feeds.values():
            feed.age(time.monotonic())
        await self._turns.sweep(self._index.holders)

    def forget_expected(self) -> None:
        """Prompts that were sent to the engine do not count any more."""
        for name in self.names:
            self._index.forget_expected(name)

    def process_ended(self) -> None:
        """The engine's process is another one, or none: it holds nothing."""
        for name in self.names:
            feed = self.feeds.get(name)
            if feed is not None:
                feed.process_ended()
            elif self._index.clear(name) and self._log is not None:
                self._log.cleared(name)
        self._known = {}

    async def stop(self) -> None:
        """Listen to nothing any more."""
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)

    def leave(self) -> None:
        """The engine leaves the index. Another one may take its name."""
        for task in self._listeners:
            task.cancel()
        for name in self._index.names_of(self._name):
            self._index.remove_engine(name)
        self._has_left = True


def index_name(engine: str, rank: int) -> str:
    """The name of a data-parallel rank in the index."""
    return f"{engine}{RANK_MARK}{rank}" if rank else engine
