"""The cache layer of an engine in a process of its own beside a server of ours, and the ways in which it stores: what
`bench lmcache` and `bench sglang` have in common.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from bench.beds.processes import PROXIES, Child
from bench.core.show import Column, Json, Section, ms, table, targets, written
from objectcache.calibration.samples import spread
from objectcache.calibration.servers import LocalServer, running_server

_W = TypeVar("_W", bound=Enum)


class CacheLayer:
    """The process of an engine's cache layer; `name` is the engine's."""

    def __init__(self, child: Child, name: str) -> None:
        self._child = child
        self._name = name

    def ask(self, call: str, **arguments: object) -> Any:
        """The value of a call. Raises BaselineError where the process fails, OSError where the call does."""
        self._child.tell(json.dumps({"do": call, **arguments}))
        answer = json.loads(self._child.answer())
        if "error" in answer:
            raise OSError(f"{self._name}: {answer['error']}")
        return answer["value"]


@contextmanager
def beside_a_server(
    folder: Path | None,
    module: str,
    python: Path,
    name: str,
    environment: Callable[[LocalServer], Mapping[str, str]] = lambda server: {},
) -> Iterator[tuple[LocalServer, CacheLayer, Path]]:
    """A server that waits for no disk, the engine's process, which speaks to nothing but the server, and a folder for
    files of the engine's own.
    """
    with ExitStack() as stack:
        files = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
        config = files / "config.toml"
        config.write_text('[storage]\ndurability = "relaxed"\n')
        server = stack.enter_context(running_server(folder, ("--config", str(config))))
        known = {
            **dict.fromkeys(PROXIES, ""),
            "NO_PROXY": "127.0.0.1",
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "HF_HUB_OFFLINE": "1",
        }
        child = Child(module, environment={**known, **environment(server)}, python=python)
        stack.callback(child.close)
        yield server, CacheLayer(child, name), files


def seed_of(settings_seed: int, ways: type[_W], place: int, round_index: int) -> int:
    """Each way has content of its own in each round: that of others could be there already."""
    return settings_seed * 1_000_000 + (round_index + 10) * len(ways) + place


def rows_of(samples: Mapping[_W, Sequence[Json]], operations: Sequence[str], sizes: Json) -> list[Json]:
    """A row for each operation and way, with its seconds."""
    return [
        {"way": way.value, "operation": name, **sizes, "seconds": spread([sample[name] for sample in found])}
        for name in operations
        for way, found in samples.items()
    ]


def seconds_of(samples: Mapping[_W, Sequence[Json]], operations: Sequence[str]) -> dict[_W, dict[str, list[float]]]:
    """The seconds of each way by operation."""
    return {way: {name: [sample[name] for sample in found] for name in operations} for way, found in samples.items()}


def problem_of(samples: Mapping[_W, Sequence[Json]], what: str) -> str | None:
    """The ways whose content did not come right."""
    wrong = [way.value for way, found in samples.items() if not all(sample["is_right"] for sample in found)]
    return f"{what} did not come as they were stored: {', '.join(wrong)}" if wrong else None


def section_of(rows: Sequence[Json], judged: Sequence[Json], way_head: str, base: Enum) -> Section:
    """One line for each operation and way, with the time of the `base` way over it, and the targets."""
    theirs = {row["operation"]: row["seconds"]["median"] for row in rows if row["way"] == base.value}

    def ratio(row: Json) -> str:
        time_s = theirs.get(row["operation"])
        return "" if time_s is None else written(time_s / row["seconds"]["median"])

    return (
        table(
            rows,
            f"operation = operation | {way_head} = way",
            Column("ms", lambda row: written(row["seconds"]["median"], ms)),
            Column("least", lambda row: written(row["seconds"]["min"], ms)),
            Column("most", lambda row: written(row["seconds"]["max"], ms)),
            Column(f"{base.value} over it", ratio),
        ),
        targets(judged),
    )
