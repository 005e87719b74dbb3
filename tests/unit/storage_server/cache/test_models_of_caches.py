"""A cache counts its objects by model as they come and go, and the bytes that are read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from descriptors.status import MODELS_MAX
from storage_server.cache.caches import MODELS_COUNTED_MAX, Cache
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.rules.books import Books
from storage_server.kernel.rules.rows import KeyChange

KEYS = [f"kv/{model}/layout/rank/{index}" for model in ("a", "b") for index in range(4)] + [
    "lmcache/a/space/0", "kv/a", "other/a/0", "0" * 64, "",
]  # fmt: skip


def cache() -> Cache:
    return Cache(Books(policy_of(Eviction.LRU, 1 << 20)), "bucket")


def put(key: str, nbytes: int) -> KeyChange:
    return KeyChange("bucket", key, 1, nbytes)


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.none() | st.integers(0, 1000)), max_size=40))
def test_counts_are_those_of_what_is_there(changes: list[tuple[str, int | None]]) -> None:
    counted, there = cache(), {}
    for key, nbytes in changes:
        counted.note(KeyChange("bucket", key, None) if nbytes is None else put(key, nbytes))
        there.pop(key, None)
        if nbytes is not None:
            there[key] = nbytes
    wanted: dict[str, tuple[int, int]] = {}
    for key, nbytes in there.items():
        parts = key.split("/")
        model = parts[1] if parts[0] in ("kv", "lmcache") and len(parts) > 2 else ""
        objects, before = wanted.get(model, (0, 0))
        wanted[model] = (objects + 1, before + nbytes)
    assert counted.status(0, 0).models == wanted


def test_bytes_that_are_read_are_counted() -> None:
    counted = cache()
    counted.note(put("kv/a/l/r/0", 100))
    counted.note_read(["kv/a/l/r/0", "kv/a/l/r/0", "kv/a/l/r/gone"])
    assert counted.status(0, 0).read_bytes == 200


def test_a_client_that_names_many_models_costs_a_bounded_table() -> None:
    counted = cache()
    for index in range(MODELS_COUNTED_MAX + 100):
        counted.note(put(f"kv/{index}/l/r/0", index))
    assert len(counted.models) == MODELS_COUNTED_MAX + 1
    told = counted.status(0, 0).models
    assert len(told) == MODELS_MAX
    assert told[""] == (100, sum(range(MODELS_COUNTED_MAX, MODELS_COUNTED_MAX + 100)))
    for index in range(MODELS_COUNTED_MAX + 100):
        counted.note(KeyChange("bucket", f"kv/{index}/l/r/0", None))
    assert counted.models == {}
