"""The engines of an orchestrator: who joins and leaves, which of them take requests, and what their models are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import aiohttp

from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.adapters.threads import to_end
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.events_feed import FeedTurns
from objectcache.orchestrator.metadata import NameTakenError
from objectcache.orchestrator.registry import Engines, EtcdRegistry
from objectcache.orchestrator.roster import Roster, is_needed
from objectcache.orchestrator.rules.kv_events import KnownBatch
from objectcache.orchestrator.rules.policies import RoutingPolicy
from objectcache.orchestrator.rules.prefix_index import PrefixIndex
from objectcache.orchestrator.settings import EngineSettings, OrchestratorSettings, engine_settings
from objectcache.orchestrator.waiting_for_engines import WaitingForEngines
from objectcache.orchestrator.writing import Writing

JOINED_AT_ONCE = 16
"""So many engines of the registry join without giving the event loop a turn."""
_log = logging.getLogger(__name__)


class Fleet:
    """The engines by name, each with a task that watches it. With a registry, engines are registered there, for others,
    too. Used on one event loop.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        http: aiohttp.ClientSession,
        index: PrefixIndex,
        policy: RoutingPolicy,
        writing: Writing | None,
        registry: EtcdRegistry | None,
        engine_headers: Mapping[str, str],
        on_up: Callable[[], None],
    ) -> None:
        """`engine_headers` go with every probe. `on_up` is called when requests that wait may go elsewhere: an engine
        takes requests again, has other models, drains or has left.
        """
        self._settings = settings
        self._http = http
        self._index = index
        self._policy = policy
        self._writing = writing
        self._registry = registry
        self._engine_headers = engine_headers
        self._on_up = on_up
        self.engines: dict[str, Engine] = {}
        self.roster = Roster(self.engines)
        self._of_registry: set[str] = set()
        self._changing = asyncio.Lock()
        self._turns = FeedTurns()
        self.waiting = WaitingForEngines(self.roster.may_come)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._wanted: Engines | None = None
        """The engines that the registry has, where that was not followed yet."""
        self._knows_all = registry is None
        self._warnings = RareWarnings(_log)
        self._seeing_out: dict[asyncio.Task[None], Engine] = {}
        """The engines that have left and may still have requests."""

    async def start(self) -> None:
        """Join the engines of the settings and those that were registered before. Raises ValueError."""
        for each in self._settings.engines:
            await self._join(each)
        if self._writing is None:
            return
        for each, is_draining in self._writing.engines():
            if each.label not in self.engines:
                if any(engine.url == each.url for engine in self.engines.values()):
                    continue  # an option or the config file has it under another name now
                try:
                    await self._join(each)
                except ValueError as error:
                    _log.warning("the engine %s of the metadata does not join: %s", each.label, error)
                    continue
            self.engines[each.label].liveness.drain(is_wanted=is_draining)
        if self._knows_all:
            self._writing.forget_others(self.engines)

    async def stop(self) -> None:
        """Watch no engine any more."""
        following = () if self._following is None else (self._following,)
        tasks = (*self._watches.values(), *following, *self._seeing_out)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def register(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Join an engine, for good where there is a place for metadata, to the end, whether the caller waits for it or
        not. Raises ValueError, MetadataError.
        """
        settings = engine_settings(document)
        _require_free(self.engines, settings)
        if self._registry is not None:
            await self._registry.add(settings)
        else:
            await to_end(asyncio.ensure_future(self._registered(settings)))
        return {"name": settings.label, "url": settings.url}

    async def _registered(self, settings: EngineSettings) -> None:
        """A new one is written down when it has joined: one for which there is no room must not stop the next start."""
        async with self._changing:
            _require_free(self.engines, settings)
            known = self.engines.get(settings.label)
            if known is not None:
                if self._writing is not None:
                    await self._writing.add_engine(settings, is_draining=known.liveness.is_draining)
                await self._replace(settings)
                return
            await self._join(settings)
            try:
                if self._writing is not None:
                    await self._writing.add_engine(settings)
            except BaseException:
                await self._leave(settings.label)
                raise

    async def remove(self, name: str) -> None:
        """Forget an engine, to the end, whether the caller waits for it or not. Raises KeyError."""
        if name in self._of_registry and self._registry is not None:
            await self._registry.remove(name)
            return
        await to_end(asyncio.ensure_future(self._removed(name)))

    async def _removed(self, name: str) -> None:
        """It is forgotten on the disk first, so that nothing has changed where that fails; and once more when nothing
        notes its blocks any more.
        """
        async with self._changing:
            if name not in self.engines:
                raise KeyError(name)
            if self._writing is not None:
                await self._writing.remove_engine(name)
            await self._leave(name)
            if self._writing is not None:
                await self._writing.remove_engine(name)

    async def drain(self, name: str, *, is_wanted: bool) -> None:
        """Send an engine no new requests, or send them again, to the end, whether the caller waits for it or not.
        Raises KeyError, MetadataError.
        """
        if name in self._of_registry and self._registry is not None:
            await self._registry.drain(name, is_wanted=is_wanted)
            if name in self.engines:
                self._drained(name, is_wanted=is_wanted)
            return
        await to_end(asyncio.ensure_future(self._wish_kept(name, is_wanted=is_wanted)))

    async def _wish_kept(self, name: str, *, is_wanted: bool) -> None:
        """Write the wish down first, and no registration may write an earlier one down meanwhile."""
        async with self._changing:
            if name not in self.engines:
                raise KeyError(name)
            if self._writing is not None:
                await self._writing.drain(name, is_wanted=is_wanted)
            self._drained(name, is_wanted=is_wanted)

    def follow(self, engines: Engines) -> None:
        """The registry has these engines now, which the caller changes no more. Where it changes faster than engines
        join, only its latest state is followed.
        """
        self._wanted = engines
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())

    def know_all(self) -> None:
        """The registry has told all engines that it has. From now on the file forgets what is written down of others:
        each pod of a rollout has a name of its own, and its blocks would stay on the disk for good.
        """
        self._knows_all = True
        is_followed = self._following is None or self._following.done()  # else it does so at its end
        if is_followed and self._writing is not None:
            self._writing.forget_others(self.engines)

    async def _follow(self) -> None:
        while self._wanted is not None:
            async with self._changing:
                engines, self._wanted = self._wanted, None
                try:
                    await self._join_and_leave(engines)
                except Exception as error:  # the next change is to be followed all the same
                    self._warnings.warn("the engines of the registry are not all followed", error=error)
        if self._knows_all and self._writing is not None:
            self._writing.forget_others(self.engines)

    async def _join_and_leave(self, engines: Engines) -> None:
        """Join and leave engines as the registry has them. Those of options and of the own file stay. Behind the first
        one for which there is no room no further one is tried.
        """
        for name in self._of_registry - set(engines):
            self._of_registry.discard(name)
            if name in self.engines:
                await self._leave(name)
        left_out: list[str] = []
        for count, (name, (settings, is_draining)) in enumerate(engines.items()):
            if not count % JOINED_AT_ONCE:
                await asyncio.sleep(0)
            known = self.engines.get(name)
            if known is not None and name not in self._of_registry:
                continue
            if known is not None:
                await self._replace(settings)
            elif left_out:
                left_out.append(name)
                continue
            else:
                try:
                    await self._join(settings)
                except ValueError:
                    left_out.append(name)
                    continue
            self._of_registry.add(name)
            self._drained(name, is_wanted=is_draining)
        if left_out:
            self._warnings.warn(
                "%d engines of the registry do not join: no room for %.300r", len(left_out), left_out[0]
            )

    def _drained(self, name: str, *, is_wanted: bool) -> None:
        """Each change of the registry tells of all engines, of which few have another wish."""
        liveness = self.engines[name].liveness
        if liveness.is_draining != is_wanted:
            liveness.drain(is_wanted=is_wanted)
            self._changed(name)

    def _changed(self, name: str) -> None:
        """Have the requests that wait for a model of this engine look again where they may go, or that they may not."""
        engine = self.engines.get(name)
        if engine is not None:
            self.waiting.wake(engine.serves)
            self._on_up()

    async def _join(self, settings: EngineSettings) -> None:
        if settings.label in self.engines:
            raise ValueError(f"two engines have the name {settings.label}")
        self._begin(settings, None if self._writing is None else await self._writing.warm(settings.label))

    async def _replace(self, settings: EngineSettings) -> None:
        """An engine that is known has other settings: it is never away, and what it holds is to be said anew."""
        before = self.engines[settings.label]
        if before.settings == settings:
            return
        if self._writing is not None:
            for each in self._index.names_of(settings.label):
                self._writing.cleared(each)
        watch = self._end(settings.label)
        self._begin(settings, None)
        engine = self.engines[settings.label]
        engine.liveness.drain(is_wanted=before.liveness.is_draining)
        await asyncio.gather(watch, return_exceptions=True)

    async def _leave(self, name: str) -> None:
        """It waits for no disk: those of the registry come and go while that hangs. Nobody waits for it any more."""
        engine = self.engines[name]
        watch = self._end(name)
        self.waiting.wake(engine.serves)
        self._on_up()
        await asyncio.gather(watch, return_exceptions=True)

    def _begin(self, settings: EngineSettings, known: Mapping[str, KnownBatch] | None) -> None:
        """Watch an engine. One that has left still has the requests that were sent to its address."""
        name = settings.label
        engine = self.engines[name] = Engine(
            settings=settings,
            http=self._http,
            index=self._index,
            poll_s=self._settings.poll_s,
            probe_timeout_s=self._settings.probe_timeout_s,
            known=known,
            log=self._writing,
            headers=self._engine_headers,
            on_up=partial(self._changed, name),
            turns=self._turns,
            is_needed=partial(is_needed, self.engines, name),
        )
        for left in self._seeing_out.values():
            if left.url == engine.url:
                left.books.requests_max = engine.books.requests_max
                engine.books = left.books
        self._watches[name] = asyncio.create_task(engine.run())

    def _end(self, name: str) -> asyncio.Task[None]:
        """Forget an engine at once. Returns its watch, which ends."""
        engine = self.engines.pop(name)
        watch = self._watches.pop(name)
        watch.cancel()
        engine.blocks.leave()
        self._policy.forget_engine(name)
        seeing_out = asyncio.create_task(engine.see_out())
        self._seeing_out[seeing_out] = engine
        seeing_out.add_done_callback(self._seeing_out.pop)
        return watch


def _require_free(engines: Mapping[str, Engine], settings: EngineSettings) -> None:
    """Raises NameTakenError where another engine has the name or the URL."""
    for known in engines.values():
        if (known.name == settings.label) != (known.url == settings.url):
            raise NameTakenError(f"the engine {known.name} has this name, or this URL")
