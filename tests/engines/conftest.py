"""Fixtures: vLLM, the tokens it gives without a store, and a store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engines.engine import OUTPUT_TOKENS, Engine, EngineHost
from tests.engines.messages import EngineSettings, Json, Prompt
from tests.engines.model import make_model
from tests.engines.prompts import shared_prefixes
from tests.engines.store import Store, running_store


class Engines:
    """Engines of the one model."""

    def __init__(self, host: EngineHost, model: Path) -> None:
        self._host = host
        self._model = model

    def plain(self, **options: Json) -> AbstractContextManager[Engine]:
        """An engine without a store."""
        return self._host.engine(EngineSettings(str(self._model), options))

    def cached(
        self,
        connector: dict[str, Json],
        model: Path | None = None,
        *,
        is_asynchronous: bool = False,
        **options: Json,
    ) -> AbstractContextManager[Engine]:
        """An engine of this model, or of the one, with one."""
        settings = EngineSettings(str(model or self._model), options, connector, is_asynchronous=is_asynchronous)
        return self._host.engine(settings)

    def tiered(
        self, tier: dict[str, Json], model: Path | None = None, *, is_asynchronous: bool = False, **options: Json
    ) -> AbstractContextManager[Engine]:
        """An engine of this model, or of the one, with vLLM's offloading over a store."""
        settings = EngineSettings(
            str(model or self._model), options, tier, is_tier=True, is_asynchronous=is_asynchronous
        )
        return self._host.engine(settings)

    def tiered_apart(
        self, tier: dict[str, Json], model: Path | None = None, **options: Json
    ) -> AbstractContextManager[Engine]:
        """One as `vllm serve` runs it, with workers of their own."""
        settings = EngineSettings(str(model or self._model), options, tier, is_multiprocess=True, is_tier=True)
        return self._host.fresh_engine(settings)

    def plain_of(self, model: Path, **options: Json) -> AbstractContextManager[Engine]:
        """An engine of another model, without a store."""
        return self._host.engine(EngineSettings(str(model), options))

    def multiprocess(
        self, connector: dict[str, Json], model: Path | None = None, **options: Json
    ) -> AbstractContextManager[Engine]:
        """One as `vllm serve` runs it: the engine's core is a process of its own."""
        settings = EngineSettings(str(model or self._model), options, connector, is_multiprocess=True)
        return self._host.fresh_engine(settings)


class Reference:
    """The tokens of an engine that caches nothing, one prompt at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def tokens(self, prompts: Sequence[Prompt], counts: int | Sequence[int] = OUTPUT_TOKENS) -> list[list[int]]:
        """How many tokens each prompt has."""
        all_counts = [counts] * len(prompts) if isinstance(counts, int) else counts
        answers = []
        for prompt, count in zip(prompts, all_counts, strict=True):
            if (prompt.tokens, count) not in self._known:
                self._known[prompt.tokens, count] = self._engine.generate([prompt], count).tokens[0]
            answers.append(self._known[prompt.tokens, count])
        return answers


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """vLLM, imported, and the model."""
    folder = tmp_path_factory.mktemp("engines")
    host = EngineHost(folder)
    try:
        make_model(folder / "model")
        yield Engines(host, folder / "model")
    finally:
        host.close()


@pytest.fixture(scope="session")
def reference(engines: Engines) -> Iterator[Reference]:
    """What is right."""
    with engines.plain(enable_prefix_caching=False) as engine:
        yield Reference(engine)


@pytest.fixture(scope="session")
def filled(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a server that has all of `shared_prefixes`, one chunk to a block."""
    folder = tmp_path_factory.mktemp("filled")
    with running_store(folder) as store, engines.cached(store.connector()) as engine:
        engine.generate(shared_prefixes())
        engine.stop()
    return folder / "data"


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    """The folder of a server to be, whose `data` is a copy of it."""
    shutil.copytree(filled, tmp_path / "store" / "data")
    return tmp_path / "store"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    with running_store(tmp_path / "store") as running:
        yield running
