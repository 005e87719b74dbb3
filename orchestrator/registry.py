"""Engines in etcd, for several orchestrators: what one registers, all of them join. While etcd cannot be reached, the
engines stay as they were.

    PREFIX/engines/NAME     the engine's settings as JSON, and whether it is draining
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping

from adapters.breaker import back_off_s
from adapters.etcd import CompactedError, Etcd, EtcdError
from orchestrator.metadata import MetadataError
from orchestrator.settings import EngineSettings, engine_settings, registered

ENGINE_BYTES_MAX = 16_384
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
_log = logging.getLogger(__name__)
Engines = Mapping[str, tuple[EngineSettings, bool]]
"""Settings of engines by name, and whether each is draining."""


class EtcdRegistry:
    """The engines under a prefix of etcd. Used on one event loop."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._prefix = f"{prefix.rstrip('/')}/engines/"
        self._engines: dict[str, tuple[EngineSettings, bool]] = {}
        self._revision = 0
        self._task: asyncio.Task[None] | None = None
        self.is_connected = False

    async def start(self, on_change: Callable[[Engines], None]) -> None:
        """Read the engines, and call `on_change` with all of them now and whenever they change. Raises MetadataError
        where etcd does not answer.
        """
        await self._etcd.start()
        try:
            await self._read()
        except EtcdError as error:
            await self._etcd.close()
            raise MetadataError(f"etcd: {error}") from error
        on_change(self._engines)
        self._task = asyncio.create_task(self._watch(on_change))

    async def close(self) -> None:
        """Listen no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._etcd.close()

    async def add(self, settings: EngineSettings, *, is_draining: bool = False) -> None:
        """Register an engine: when this returns, a majority of etcd has it. Raises MetadataError."""
        value = json.dumps({**registered(settings), "is_draining": is_draining}).encode()
        try:
            await self._etcd.put(f"{self._prefix}{settings.label}", value)
        except EtcdError as error:
            raise MetadataError(f"etcd: {error}") from error

    async def remove(self, name: str) -> None:
        """Forget an engine. Raises MetadataError."""
        try:
            await self._etcd.delete(f"{self._prefix}{name}")
        except EtcdError as error:
            raise MetadataError(f"etcd: {error}") from error

    async def _read(self) -> None:
        found = await self._etcd.range(self._prefix)
        self._engines = {}
        for entry in found.entries:
            self._take(entry.key, entry.value)
        self._revision = found.revision
        self.is_connected = True

    async def _watch(self, on_change: Callable[[Engines], None]) -> None:
        failures = 0
        while True:
            try:
                async for changes in self._etcd.watch(self._prefix, self._revision + 1):
                    self.is_connected, failures = True, 0
                    for change in changes:
                        self._take(change.key, change.value)
                        self._revision = max(self._revision, change.revision)
                    on_change(self._engines)
            except EtcdError as error:
                self.is_connected = False
                failures += 1
                if not isinstance(error, CompactedError):
                    _log.warning("the engines stay as they were: %s", error)
                await asyncio.sleep(back_off_s(failures, PAUSE_S_MIN, PAUSE_S_MAX))
                try:
                    await self._read()  # etcd may have been rebuilt, or compacted
                    on_change(self._engines)
                except EtcdError:
                    continue

    def _take(self, key: str, value: bytes | None) -> None:
        name = key.removeprefix(self._prefix)
        self._engines = {known: each for known, each in self._engines.items() if known != name}
        if value is None:
            return
        try:
            document = json.loads(value) if len(value) <= ENGINE_BYTES_MAX else None
            if not isinstance(document, dict):
                raise ValueError("it must be a JSON object of a few KiB")
            is_draining = document.pop("is_draining", False) is True
            settings = engine_settings({**document, "name": name})
        except (ValueError, RecursionError) as error:
            _log.warning("the entry %s of etcd is no engine: %s", key, error)
            return
        self._engines[name] = settings, is_draining
