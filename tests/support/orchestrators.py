"""An orchestrator and canned engines on the running event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import aiohttp

from bench.beds.canned_engines import CannedEngine, CannedSettings
from objectcache.cli.listening import Listen, listening
from objectcache.orchestrator.process import Orchestration
from objectcache.orchestrator.registry import EtcdRegistry
from objectcache.orchestrator.settings import EngineSettings, OrchestratorSettings
from tests.support.waiting import until

ADMIN_TOKEN = "a-token-of-sixteen-letters"
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
QUICK = OrchestratorSettings(admin_token=ADMIN_TOKEN, poll_s=0.05, probe_timeout_s=0.3, first_byte_timeout_s=20.0)


def words(prompt: Any) -> list[str]:
    """The canned answer to a prompt of token ids, of four tokens."""
    seed = sha256(json.dumps(prompt).encode()).hexdigest()
    return [f" {seed[at : at + 4]}" for at in range(4)]


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def engine(self) -> str:
        """Where it came from."""
        return self.headers.get("x-objectcache-engine", "")

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def words(self) -> list[str]:
        """The pieces of a stream of completions."""
        events = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        documents = [json.loads(event) for event in events if event != "[DONE]"]
        return [each["choices"][0].get("text", "") for each in documents if "choices" in each]


class Bed:
    """An orchestrator in front of some engines."""

    def __init__(self, made: Orchestration, engines: Sequence[CannedEngine]) -> None:
        self.made = made
        self.url = made.url
        self.orchestrator = made.orchestrator
        self.engines = list(engines)
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))

    async def ask(self, method: str, path: str, document: Any = None, **options: Any) -> Answer:
        """One request, and its whole answer. Operators have the token."""
        if path.startswith("/_orchestrator"):
            options.setdefault("headers", ADMIN)
        if document is not None:
            options["json"] = document
        async with self.http.request(method, f"{self.url}{path}", **options) as answer:
            return Answer(answer.status, {name.lower(): value for name, value in answer.headers.items()},
                          await answer.read())  # fmt: skip

    async def complete(self, prompt: Any, **options: Any) -> Answer:
        """A completion."""
        headers = options.pop("headers", {})
        return await self.ask(
            "POST",
            "/v1/completions",
            {"model": "canned", "prompt": prompt, "max_tokens": 4, **options},
            headers=headers,
        )

    def engine_at(self, url: str) -> CannedEngine:
        """The engine of an address."""
        return next(engine for engine in self.engines if engine.url == url)


@asynccontextmanager
async def canned(count: int, settings: CannedSettings | None = None) -> AsyncIterator[list[CannedEngine]]:
    """Some engines."""
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(count):
            engine = CannedEngine(None if settings is None else replace(settings))
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        yield engines


@asynccontextmanager
async def orchestrated(
    engines: Sequence[CannedEngine],
    settings: OrchestratorSettings = QUICK,
    *,
    registry: EtcdRegistry | None = None,
    is_waiting: bool = True,
) -> AsyncIterator[Bed]:
    """An orchestrator in front of these engines, beside those of the settings; by default when all of them are up."""
    own = tuple(EngineSettings(engine.url) for engine in engines)
    settings = replace(settings, engines=(*settings.engines, *own))
    made = Orchestration(settings, None, lambda server: listening(server, Listen()), registry)
    await made.start()
    bed = Bed(made, engines)
    try:
        if is_waiting:
            known = made.orchestrator.engines
            await until(lambda: all(engine.status().value == "up" for engine in known.values()))
            publishing = {engine.url for engine in engines if engine.settings.publishes}
            await until(lambda: all(known[url].blocks.feeds for url in publishing if url in known))
        yield bed
    finally:
        await bed.http.close()
        await made.close()
