"""What the caches of one store may take together. What they evict is tried in tests/integration/test_caches.py."""

from __future__ import annotations

import math
from pathlib import Path

from descriptors.objects import BucketCache
from descriptors.units import MIB
from storage_server.cache.cache_set import CacheSet
from storage_server.cache.rules.entry import Entry
from storage_server.kernel.data.bound import Bound
from storage_server.kernel.data.space import Space


def test_pins_of_a_bucket_that_was_deleted_hold_nothing(tmp_path: Path) -> None:
    """Its books go with it, and are not told that its objects have gone."""
    bound = Bound("the directory", lambda: None, lambda: 0)
    caches = CacheSet((), Space(tmp_path, 64 * MIB), bound, lambda: None, 0.0, lambda: 0)
    for bucket in ("deleted", "kept"):
        caches.declare(bucket, BucketCache(None))
    caches.bound_holds()
    for bucket in ("deleted", "kept"):
        cache = caches.of(bucket)
        assert cache is not None
        for number in range(16):
            cache.books.put((bucket, f"key-{number}"), Entry(1, MIB, 1.0, 1.0, pinned_until=math.inf))
        assert cache.books.held.nbytes == 16 * MIB
        caches.declare("deleted", None)
        caches.bound_holds()
