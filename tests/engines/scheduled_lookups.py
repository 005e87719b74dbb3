"""Scenarios in which lookups are slow, or fail."""

from __future__ import annotations

import time
from pathlib import Path

from tests.engines.messages import Json
from tests.engines.scheduled import ANSWER_S, PREFIX, Facts, ScheduledEngine, ScheduledStep, scheduled
from tests.engines.scheduled_config import Setup

__all__ = ["failing_lookup", "late_lookup", "slow_lookup", "unnameable_tokens"]
SHORT = (1, 2, 3)
"""No whole chunk: nothing to look up."""


def slow_lookup(folder: Path) -> Facts:
    """A's lookup is not answered at first; B needs none."""
    with scheduled(folder, Setup(has_quick_store=False)) as engine:
        engine.fill_store()
        engine.store.may_answer.clear()
        engine.add("A", PREFIX + SHORT)
        engine.add("B", SHORT)
        first = engine.run()
        is_asked = engine.store.is_asked.wait(ANSWER_S)
        second = engine.run()
        engine.store.may_answer.set()
        served = _run_until(engine, "A")
        return {
            "is asked": is_asked,
            "meanwhile": [sorted(first.computed), sorted(second.computed)],
            "loads": served.loads,
            "lookups": engine.store.lookup_count,
        }


def late_lookup(folder: Path) -> Facts:
    """A's lookup is never answered; C comes when A has waited long enough."""
    options: dict[str, Json] = {"lookup_timeout_s": 0.05, "retry_s": 600.0}
    with scheduled(folder, Setup(options=options, has_quick_store=False)) as engine:
        engine.fill_store()
        engine.store.may_answer.clear()
        engine.add("A", PREFIX + SHORT)
        first = engine.run()
        assert engine.store.is_asked.wait(ANSWER_S)
        served = _run_until(engine, "A")
        engine.add("C", PREFIX[::-1])
        return {
            "first": sorted(first.computed),
            "then": served.found,
            "loads": served.loads,
            "next": sorted(engine.run().computed),
            "lookups": engine.store.lookup_count,
        }


def failing_lookup(folder: Path, kind: str) -> Facts:
    """A's lookup fails with an exception of this kind; the engine goes on, C is not looked up."""
    kinds: dict[str, Exception] = {
        error.__name__: error("answered by something else") for error in (KeyError, TypeError, ValueError, OSError)
    }
    with scheduled(folder, Setup(options={"retry_s": 600.0})) as engine:
        engine.store.failure = kinds[kind]
        engine.add("A", PREFIX + SHORT)
        step = engine.run()
        engine.add("C", PREFIX[::-1])
        following = engine.run()
        return {
            "ran": sorted(step.computed),
            "next": sorted(following.computed),
            "lookups": engine.store.lookup_count,
            "failures": engine.connector.counters.totals["lookup_failures"],
        }


def unnameable_tokens(folder: Path) -> Facts:
    """A token that no key can hold; vLLM's front end lets it through where it has no tokenizer."""
    with scheduled(folder) as engine:
        engine.add("A", (-1,) * len(PREFIX))
        return {"ran": sorted(engine.run().computed), "lookups": engine.store.lookup_count}


def _run_until(engine: ScheduledEngine, request_id: str) -> ScheduledStep:
    """Steps, until one has the request; that one is returned."""
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:
        step = engine.run()
        if request_id in step.computed:
            return step
    raise TimeoutError(f"{request_id} was not scheduled")
