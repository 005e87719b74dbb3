"""What to measure. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.engine.cases import Case, make_cases
from bench.engine.shapes import Shape
from bench.engine.ways import Way
from nixl_client.transport import Transport


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`chunk_tokens` is G of our connector; `folder` is for stores and the model."""

    shape: Shape
    ways: tuple[Way, ...]
    contexts: tuple[int, ...]
    hit_rates: tuple[float, ...]
    runs: int
    chunk_tokens: int
    transport: Transport
    seed: int = 1
    serve_options: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def cases(self) -> tuple[Case, ...]:
        """Raises ValueError for a prefix that is no whole number of blocks."""
        return make_cases(self.contexts, self.hit_rates)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """The lengths of prefixes, ascending."""
        return tuple(sorted({case.prefix_tokens for case in self.cases}))
