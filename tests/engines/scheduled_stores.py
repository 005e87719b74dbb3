"""Scenarios of what is written: when another connector loads, when caches are reset, when a prompt gets an image."""

from __future__ import annotations

from pathlib import Path

from tests.engines.messages import Json
from tests.engines.scheduled import PREFIX, PREFIX_CHUNKS, Facts, scheduled
from tests.engines.scheduled_config import Setup

__all__ = ["image_in_a_later_turn", "peer_loads_between_steps", "peer_loads_in_a_step", "producer", "reset"]
TAIL = (1, 2, 3)
OTHER = (3,) * 40


def peer_loads_between_steps(folder: Path) -> Facts:
    """Another connector loads for A; A is aborted before anything has come. Z keeps the engine busy."""
    peer: dict[str, Json] = {"request_id": "A", "tokens": len(PREFIX), "is_async": True}
    with scheduled(folder, Setup("fail", peer=peer)) as engine:
        engine.add("A", PREFIX + TAIL)
        engine.add("Z", OTHER)
        step = engine.run()
        given = engine.scheduler.kv_cache_manager.get_block_ids("A")[0][:PREFIX_CHUNKS]
        status, counted = engine.requests["A"].status.name, engine.requests["A"].num_computed_tokens
        engine.abort("A")
        following = engine.run()
        return {
            "A": [status, counted],
            "ran": sorted(step.computed),
            "announced": [len(given), set(given) <= step.work.rewritten],
            "stored of A": [job.request_id for job in following.work.stores if job.request_id == "A"],
        }


def peer_loads_in_a_step(folder: Path, is_lost: bool) -> Facts:
    """Another connector loads for A in the step that needs it, or fails to."""
    peer: dict[str, Json] = {"request_id": "A", "tokens": len(PREFIX), "is_async": False}
    with scheduled(folder, Setup(peer=peer)) as engine:
        engine.add("A", PREFIX + TAIL)
        step = engine.step()
        blocks = engine.scheduler.kv_cache_manager.get_block_ids("A")[0][:PREFIX_CHUNKS]
        engine.end(step, blocks if is_lost else ())
        steps = [step, engine.run(), engine.run()]
        return [[each.computed["A"], each.stores] for each in steps]


def producer(folder: Path) -> Facts:
    """An engine that only writes: A's prefix is not stored, B's is in part."""
    with scheduled(folder, Setup("fail", role="kv_producer", arguments={"enable_prefix_caching": False})) as engine:
        stored: dict[str, list[list[int]]] = {}
        loads: list[list[int]] = []
        for request_id in ("A", "B"):
            engine.add(request_id, PREFIX + TAIL, output_tokens=4)
            stores: list[list[int]] = []
            while engine.scheduler.has_requests():
                step = engine.run()
                stores += step.stores
                loads += step.loads
            stored[request_id] = stores
            engine.fill_store(PREFIX[: len(PREFIX) // 2])
        return {"stored": stored, "loads": loads}


def reset(folder: Path) -> Facts:
    """The caches are reset while A runs, as after new weights; then B comes with A's prefix, which is stored."""
    with scheduled(folder, Setup("fail")) as engine:
        engine.add("A", PREFIX + TAIL, output_tokens=200)
        engine.run()
        old = engine.keys(PREFIX)
        engine.fill_store()
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        is_reset = engine.scheduler.reset_connector_cache()
        step = engine.run()
        engine.add("B", PREFIX[: len(PREFIX) // 2] + OTHER)
        following = engine.run()
        last = engine.run()
        new_keys = [key for job in last.work.stores for key in job.keys[0]]
        return {
            "is reset": is_reset,
            "same keys": len(set(old) & set(engine.keys(PREFIX))),
            "workers told": [step.work.is_reset, following.work.is_reset],
            "A goes on": step.computed["A"],
            "loads": step.loads + following.loads,
            "stored": [
                [job.request_id, job.chunk_range.first_chunk, job.chunk_range.end_chunk] for job in last.work.stores
            ],
            "under old keys": len(set(old) & set(new_keys)),
        }


def image_in_a_later_turn(folder: Path, has_image: bool) -> Facts:
    """A's next turn may bring an image, after its text has been computed; then it ends. Z keeps the engine busy."""
    with scheduled(folder, Setup("fail")) as engine:
        engine.add("A", PREFIX + TAIL)
        engine.add("Z", OTHER)
        engine.run()
        if has_image:
            engine.requests["A"].mm_features = [object()]
        engine.abort("A")
        step = engine.run()
        return [[job.request_id, job.chunk_range.first_chunk, job.chunk_range.end_chunk] for job in step.work.stores]
