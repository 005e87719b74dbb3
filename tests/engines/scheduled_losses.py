"""Scenarios in which loads fail: what other requests, and later ones, are given."""

from __future__ import annotations

from pathlib import Path

from tests.engines.scheduled import PREFIX, Facts, scheduled
from tests.engines.scheduled_config import Setup

__all__ = [
    "bad_chunk",
    "failed_load",
    "lost_load",
    "lost_load_with_a_step_ahead",
    "partly_lost_load",
    "sharer",
    "sharer_of_long_prefill",
]
TAILS = ((1, 2, 3), (7, 8, 9), (4, 5, 6))
BAD_CHUNK = 3


def lost_load(folder: Path, policy: str, ending: str) -> Facts:
    """A loses all it loads and ends in some way; what is stored is gone too. B, or A again, comes next."""
    with scheduled(folder, Setup(policy)) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        step = engine.step()
        engine.store.keys.clear()
        if ending == "aborted during the step":
            engine.abort("A")
        reasons = engine.end(step, step.loaded_blocks())
        if ending == "aborted after the step":
            engine.abort("A")
        if ending == "preempted":
            engine.preempt("A")
        else:
            engine.add("B", PREFIX + TAILS[1])
        following = engine.step()
        return {"loads": step.loads, "ended": reasons, "next": following.found}


def lost_load_with_a_step_ahead(folder: Path, is_aborted: bool) -> Facts:
    """The next step is made before it is known that A's load is lost; B comes with it. A fails, or is aborted."""
    with scheduled(folder, Setup("fail", is_async=True)) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        step = engine.step()
        engine.store.keys.clear()
        engine.add("B", PREFIX + TAILS[1])
        ahead = engine.step()
        if is_aborted:
            engine.abort("A")
        reasons = engine.end(step, step.loaded_blocks())
        following = engine.step()
        engine.end(ahead)
        return {"ahead": ahead.found, "ended": reasons, "next": following.found}


def partly_lost_load(folder: Path, policy: str) -> Facts:
    """A loses what it loads from a block on and is aborted; B has the same prefix, and nothing is stored any more."""
    with scheduled(folder, Setup(policy)) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        step = engine.step()
        engine.store.keys.clear()
        engine.end(step, step.loaded_blocks(BAD_CHUNK))
        engine.abort("A")
        engine.add("B", PREFIX + TAILS[1])
        return engine.step().found


def sharer(folder: Path, policy: str, is_lost: bool, is_aborted: bool) -> Facts:
    """A and B come together; A loads what both need, and may be aborted during the step, or lose the load."""
    with scheduled(folder, Setup(policy)) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        engine.add("B", PREFIX + TAILS[1])
        step = engine.step()
        engine.store.keys.clear()
        if is_aborted:
            engine.abort("A")
        reasons = engine.end(step, step.loaded_blocks() if is_lost else ())
        following = engine.step()
        return {
            "first": step.found,
            "ended": reasons,
            "next": following.found,
            "loads": step.loads + following.loads,
        }


def sharer_of_long_prefill(folder: Path) -> Facts:
    """A loses what both need and computes it in pieces; B comes in between."""
    with scheduled(folder, Setup(arguments={"long_prefill_token_threshold": 64})) as engine:
        engine.fill_store()
        engine.add("A", PREFIX + TAILS[0])
        engine.add("B", PREFIX + TAILS[1])
        step = engine.step()
        engine.store.keys.clear()
        engine.end(step, step.loaded_blocks())
        return [step.found, *(engine.run().found for _ in range(4))]


def bad_chunk(folder: Path, policy: str) -> Facts:
    """One chunk cannot be read. Three requests come, one after the other; the engine keeps no prefixes itself."""
    answers = []
    with scheduled(folder, Setup(policy, arguments={"enable_prefix_caching": False})) as engine:
        engine.fill_store()
        for index, tail in enumerate(TAILS):
            request_id = f"R{index}"
            engine.add(request_id, PREFIX + tail, output_tokens=3)
            step = engine.step()
            if index == 0:
                lost = step.loaded_blocks(BAD_CHUNK)
                reasons = engine.end(step, lost, bad_chunks={step.work.loads[0].job_id: BAD_CHUNK})
            else:
                reasons = engine.end(step)
            loads, repairs = step.loads, step.repairs
            while engine.scheduler.has_requests():
                step = engine.step()
                reasons |= engine.end(step)
                repairs += step.repairs
            answers.append({"loads": loads, "repairs": repairs, "ended": reasons[request_id]})
    return answers


def failed_load(folder: Path, retry_s: float) -> Facts:
    """A's load fails in time, not by a bad chunk. B comes next, with another prefix that is stored too."""
    with scheduled(folder, Setup(options={"retry_s": retry_s})) as engine:
        other = PREFIX[::-1]
        engine.fill_store()
        engine.fill_store(other)
        engine.add("A", PREFIX + TAILS[0])
        step = engine.step()
        engine.end(step, step.loaded_blocks(), failed_loads=1)
        engine.add("B", other + TAILS[1])
        following = engine.step()
        return {"lookups": engine.store.lookup_count, "loads": following.loads, "ran": sorted(following.computed)}
