"""A test's side of SGLang: engine processes by name, over a store or over none."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.engines.asked_process import AskedProcess, asked_process
from tests.engines.environment import sglang_python
from tests.engines.messages import Json
from tests.engines.store import BUCKET
from tests.support.requests import OWNER

RETRY_S = 0.2
"""So long a store that failed is left alone in these tests."""
_numbers = itertools.count(1)


class Node:
    """One engine process of SGLang's: its pools, its controller, and a storage back-end."""

    def __init__(self, process: AskedProcess, name: str) -> None:
        self._process = process
        self._name = name

    def set(self, seed: int, count: int) -> int:
        """How many of the first pages of a seed are stored by one call."""
        return sum(self._process.ask("set", node=self._name, seed=seed, count=count))

    def exists(self, seed: int, count: int) -> int:
        """How many are found."""
        return int(self._process.ask("exists", node=self._name, seed=seed, count=count))

    def get(self, seed: int, count: int) -> int:
        """How many come; they are right, come from the first on, and nothing beside them is touched."""
        return self._came(self._process.ask("get", node=self._name, seed=seed, count=count))

    @contextlib.contextmanager
    def held_get(self, seed: int, count: int) -> Iterator[list[int]]:
        """A load that the server has begun and that goes on after the block. The list then says how many came."""
        came: list[int] = []
        self._process.begin("get", node=self._name, seed=seed, count=count, is_held=True)
        assert self._process.answer()["is_begun"]
        yield came
        self._process.begin("go on")
        came.append(self._came(self._process.value()))

    def set_all(self, seed: int, count: int, states: list[int]) -> dict[str, list[bool]]:
        """Pages of KV, and the states of some, stored by the calls for several pools."""
        return dict(self._process.ask("set_all", node=self._name, seed=seed, count=count, states=states))

    def exists_all(
        self, seed: int, count: int, policy: str = "trailing_pages"
    ) -> tuple[int, dict[str, int], list[int]]:
        """The pages that can be restored, those found by pool, and the lengths that can be restored."""
        pages, pools, lengths = self._process.ask("exists_all", node=self._name, seed=seed, count=count, policy=policy)
        return pages, pools, lengths

    def get_all(self, seed: int, count: int, state: int) -> dict[str, list[bool]]:
        """Pages of KV and one state; the bytes of those that come are right."""
        found, is_right = self._process.ask("get_all", node=self._name, seed=seed, count=count, state=state)
        assert is_right
        return dict(found)

    def backup(self, seed: int, count: int) -> int:
        """How many pages the controller's thread has stored."""
        return int(self._process.ask("backup", node=self._name, seed=seed, count=count))

    def prefetch(self, seed: int, count: int) -> tuple[int, int]:
        """How many pages the controller's threads find, and how many they load; those are right."""
        found, loaded, is_right = self._process.ask("prefetch", node=self._name, seed=seed, count=count)
        assert is_right
        return found, loaded

    def names(self, seed: int, count: int, pool: str = "kv") -> list[str]:
        """The objects of our back-end's pages."""
        return list(self._process.ask("names", node=self._name, pool=pool, seed=seed, count=count))

    def counters(self) -> dict[str, float]:
        """Our back-end's figures."""
        return dict(self._process.ask("counters", node=self._name))

    def stats(self) -> dict[str, list[float]]:
        """The figures that SGLang asks for."""
        return dict(self._process.ask("stats", node=self._name))

    def clear(self) -> None:
        """Clear the storage."""
        self._process.ask("clear", node=self._name)

    def close(self) -> None:
        """End."""
        self._process.ask("close", node=self._name)

    def _came(self, answer: list[object]) -> int:
        found, is_right, _ = answer
        assert isinstance(found, list)
        assert is_right
        came = sum(found)
        assert found == [True] * came + [False] * (len(found) - came)
        return came


class SGLang:
    """A process that has imported SGLang."""

    def __init__(self, process: AskedProcess) -> None:
        self.process = process

    @contextlib.contextmanager
    def node(self, backend: str, options: dict[str, Json], **arguments: Json) -> Iterator[Node]:
        """An engine process, ended with the block. Raises AssertionError with SGLang's error where it does not
        start.
        """
        name = f"node-{next(_numbers)}"
        self.process.ask("open", node=name, backend=backend, options=options, **arguments)
        made = Node(self.process, name)
        try:
            yield made
        finally:
            made.close()

    def ours(
        self, endpoint: str, *, options: dict[str, Json] | None = None, **arguments: Json
    ) -> contextlib.AbstractContextManager[Node]:
        """One with our back-end."""
        return self.node("dynamic", backend_options(endpoint, options or {}), **arguments)

    def seaweedfs(self, endpoint: str, **arguments: Json) -> contextlib.AbstractContextManager[Node]:
        """One with SGLang's own back-end for SeaweedFS, which speaks S3."""
        return self.node("seaweedfs", seaweedfs_options(endpoint), **arguments)


def backend_options(endpoint: str, options: Mapping[str, Json]) -> dict[str, Json]:
    """SGLang's extra configuration for our back-end, with waits that no busy machine ends."""
    waits: dict[str, Json] = {"lookup_timeout_s": 30.0, "store_timeout_s": 60.0, "retry_s": RETRY_S}
    internals = options.get("internals", {})
    assert isinstance(internals, dict)
    return {
        "backend_name": "objectcache",
        "module_path": "nixl_client.connectors.sglang",
        "class_name": "ObjectCacheHiCache",
        "interface_v1": 1,
        "endpoint": endpoint,
        "bucket": BUCKET,
        "load_timeout_s": 60.0,
        **options,
        "internals": {**waits, **internals},
    }


def seaweedfs_options(endpoint: str, **options: Json) -> dict[str, Json]:
    """SGLang's extra configuration for its back-end for SeaweedFS."""
    return {"endpoint": endpoint, "access_key": OWNER[0], "secret_key": OWNER[1], **options}


@contextlib.contextmanager
def sglang(log: Path) -> Iterator[SGLang]:
    """SGLang, killed with the block."""
    with asked_process(sglang_python(), "tests.engines.sglang_host", (), log) as process:
        yield SGLang(process)
