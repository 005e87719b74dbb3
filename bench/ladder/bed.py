"""What the figures that need a server share: its options, its files, its content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.server import BenchServer, running_server


@dataclass(frozen=True, slots=True)
class LadderSettings:
    """What every figure is given. `serve_options` are further ones of `objectcache serve`; `folder` is where stores go
    for the time being; `is_smoke` asks whether it works, not how fast.
    """

    runs: int
    seed: int
    is_smoke: bool
    transport: str = "ucx"
    serve_options: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class ServedFolder:
    """A running server, and where it keeps its store."""

    server: BenchServer
    data: Path


@contextmanager
def served_folder(settings: LadderSettings, config: str = "") -> Iterator[ServedFolder]:
    """A server of our own whose files can be looked at; `config` is TOML. Raises BenchServerError."""
    with tempfile.TemporaryDirectory(prefix="objectcache-ladder-", dir=settings.folder) as name:
        folder = Path(name)
        options: Sequence[str] = settings.serve_options
        if config:
            (folder / "config.toml").write_text(config)
            options = ["--config", str(folder / "config.toml"), *options]
        with running_server(folder, options) as server:
            yield ServedFolder(server, next(folder.glob("objectcache-bench-*/data")))


class Session:
    """What the figures of one run share: their settings, and a server that starts when one first asks for it."""

    def __init__(self, settings: LadderSettings, stack: ExitStack) -> None:
        self.settings = settings
        self._stack = stack
        self._served: ServedFolder | None = None

    def served(self) -> ServedFolder:
        """The shared server. Raises BenchServerError."""
        if self._served is None:
            self._served = self._stack.enter_context(served_folder(self.settings))
        return self._served


@contextmanager
def one_core() -> Iterator[int]:
    """Keep this thread, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    core = max(before)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, before)
