"""Checks of whether the tokens that prompts are routed by are the engines' own."""

from __future__ import annotations

import asyncio

from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.meter import Meter
from objectcache.orchestrator.router import Router

UNMATCHED_MAX = 5
UNMATCHED_CHECK_S = 2.0
CHECKS_MAX = 1024


class TokenChecks:
    """Some time after an answer the engine's events must show the prompt's first block. Where they do not, again and
    again, the tokens here are others than the engine's. Used on one event loop.
    """

    def __init__(self, router: Router, meter: Meter) -> None:
        self._router = router
        self._meter = meter
        self._checks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """Comparisons of prompts with events that are to come."""
        return len(self._checks)

    def begin(self, engine: Engine, first_block: bytes) -> None:
        """The engine has answered a prompt that begins with this block."""
        if len(self._checks) < CHECKS_MAX:
            task = asyncio.create_task(self._check(engine, first_block))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def stop(self) -> None:
        """Compare nothing more."""
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)

    async def _check(self, engine: Engine, first_block: bytes) -> None:
        await asyncio.sleep(UNMATCHED_CHECK_S)
        has_come = self._router.has_come(engine, first_block)
        if has_come is None:
            return
        engine.unmatched_count = 0 if has_come else engine.unmatched_count + 1
        if engine.unmatched_count == UNMATCHED_MAX:
            self._meter.mismatched()
            engine.warnings.warn(
                "the blocks of %d prompts in a row did not show in the events of %s: the tokens that requests are"
                " routed by are not the engine's own; is the tokenizer of its model?",
                UNMATCHED_MAX,
                engine.name,
            )
