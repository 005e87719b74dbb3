"""Scenarios in which requests wait for their loads while others run."""

from __future__ import annotations

from pathlib import Path

from tests.engines.scheduled import PREFIX, Facts, ScheduledEngine, scheduled
from tests.engines.scheduled_config import Setup

__all__ = ["aborted_ahead", "late_ahead", "load_ahead", "sharer_ahead"]
TAILS = ((1, 2, 3), (7, 8, 9))
ASYNC = Setup("recompute", is_async=True)


def load_ahead(folder: Path) -> Facts:
    """A is loaded over two steps; B has nothing in common with it."""
    with scheduled(folder, ASYNC) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        engine.add("B", TAILS[1])
        first, second = engine.step(), engine.step()
        engine.end(first, arrived=())
        engine.end(second, arrived=["A"])
        third = engine.step()
        meanwhile = [sorted(step.computed) for step in (first, second)]
        found = {"A": third.computed["A"]}
        return {"loads": first.loads, "meanwhile": meanwhile, "next": found, "is again": bool(third.loads)}


def sharer_ahead(folder: Path, is_lost: bool) -> Facts:
    """A and B come together. What A loads both need; all of it may be late."""
    with scheduled(folder, ASYNC) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        engine.add("B", PREFIX + TAILS[1])
        step = engine.step()
        if is_lost:
            engine.store.keys.clear()
        engine.end(step, step.loaded_blocks() if is_lost else ())
        found, loads = {}, step.loads
        for _ in range(3):
            following = engine.run()
            loads += following.loads
            found |= {each: count for each, count in following.computed.items() if each not in found}
        return {"loads": loads, "next": found}


def late_ahead(folder: Path, first_lost: int) -> Facts:
    """A's load is given up, though all is stored."""
    with scheduled(folder, ASYNC) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        step = engine.step()
        engine.end(step, step.loaded_blocks(first_lost))
        following = engine.step()
        return {"loads": step.loads + following.loads, "next": following.computed}


def aborted_ahead(folder: Path) -> Facts:
    """A is aborted while it is loaded."""
    with scheduled(folder, ASYNC) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        step = engine.step()
        engine.abort("A")
        engine.end(step, arrived=())
        held = _held(engine)
        engine.run()
        return {"held": held, "held after": _held(engine)}


def _held(engine: ScheduledEngine) -> int:
    pool = engine.scheduler.kv_cache_manager.block_pool
    held: int = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return held
