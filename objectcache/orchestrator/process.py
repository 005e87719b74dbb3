"""An orchestrator that listens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from objectcache.adapters.limited_server import LimitedServer
from objectcache.orchestrator.app import App
from objectcache.orchestrator.registry import EtcdRegistry
from objectcache.orchestrator.service import Orchestrator
from objectcache.orchestrator.settings import OrchestratorSettings

Listen = Callable[[LimitedServer], Awaitable[tuple[web.ServerRunner, str]]]


class Orchestration:
    """Starts the parts, then the HTTP surface. `listen` has a server listen, and gives its address."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        engine_key: str | None,
        listen: Listen,
        registry: EtcdRegistry | None = None,
    ) -> None:
        self.orchestrator = Orchestrator(settings, registry, engine_key)
        self._app = App(self.orchestrator)
        self._settings = settings
        self._listen = listen
        self._runner: web.ServerRunner | None = None
        self._is_closed = False
        self.url = ""

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are refused."""
        return self.orchestrator.under_way.is_stopping

    async def start(self) -> None:
        """Join the engines and listen. Raises ValueError, OSError."""
        await self.orchestrator.start()
        self._runner, self.url = await self._listen(self._app.server())

    async def close(self) -> None:
        """Let requests that run end, end, and write down what waits to be. Later calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await self.orchestrator.under_way.stop(self._settings.drain_s)
        if self._runner is not None:
            await self._runner.cleanup()
        await self.orchestrator.stop()
