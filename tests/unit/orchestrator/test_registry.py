"""The entries of etcd: whoever may write there chooses how many there are, and how long."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from objectcache.adapters.etcd import Etcd, EtcdChange, EtcdEntry, EtcdError, EtcdRange, QuietWatchError
from objectcache.orchestrator import registry as registry_module
from objectcache.orchestrator.metadata_file import MetadataError
from objectcache.orchestrator.registry import (
    NAME_CHARACTERS_MAX,
    TOLD_AT_ONCE,
    Document,
    Engines,
    EtcdRegistry,
    Followers,
)
from objectcache.orchestrator.settings import engine_settings
from tests.support.waiting import settled, until


class PlayedEtcd:
    """An etcd without a socket: entries that are there at the start, and changes as they are put."""

    def __init__(self, entries: Mapping[str, bytes]) -> None:
        self._entries = dict(entries)
        self.revisions = dict.fromkeys(entries, 1)
        self.etcd_id = self.revision = 1
        self.while_changing: Callable[[], None] = lambda: None
        """Somebody else writes between a reading and a change."""
        self.changes: dict[str, asyncio.Queue[list[EtcdChange]]] = {}

    async def start(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        """There is nothing to close."""

    async def range(self, prefix: str, entries_max: int) -> EtcdRange:
        """The entries of the start."""
        found = [EtcdEntry(key, value, 1) for key, value in self._entries.items() if key.startswith(prefix)]
        return EtcdRange(self.etcd_id, self.revision, tuple(found))

    async def call(self, _: str, body: Mapping[str, str]) -> Mapping[str, Any]:
        """The entry of one key."""
        key = base64.b64decode(body["key"]).decode()
        if key not in self._entries:
            return {}
        value, revision = base64.b64encode(self._entries[key]).decode(), str(self.revisions[key])
        return {"kvs": [{"key": body["key"], "value": value, "mod_revision": revision}]}

    async def create(self, key: str, value: bytes) -> EtcdEntry | None:
        """Set a key that does not exist."""
        self.while_changing()
        if key in self._entries:
            return EtcdEntry(key, self._entries[key], self.revisions[key])
        self.set(key, value)
        return None

    async def replace(self, before: EtcdEntry, value: bytes) -> bool:
        """Set a key that has not changed."""
        self.while_changing()
        is_same = self.revisions.get(before.key) == before.revision
        if is_same:
            self.set(before.key, value)
        return is_same

    def set(self, key: str, value: bytes) -> None:
        """Set a key, whatever it was."""
        self._entries[key] = value
        self.revisions[key] = self.revisions.get(key, 0) + 1

    def document(self, key: str) -> Any:
        """The value of a key."""
        return json.loads(self._entries[key])

    async def put(self, key: str, value: bytes) -> None:
        """Set a key, and tell of it."""
        self.set(key, value)
        self.tell(EtcdChange(key, value, self.revision))

    async def delete(self, key: str) -> bool:
        """Delete a key, and tell of it, where it is there."""
        if self._entries.pop(key, None) is None:
            return False
        self.tell(EtcdChange(key, None, self.revision))
        return True

    def tell(self, change: EtcdChange) -> None:
        """Have those that watch see a change."""
        self.revision += 1
        prefix = next(prefix for prefix in self.changes if change.key.startswith(prefix))
        self.changes[prefix].put_nowait([change])

    def lose(self, *keys: str) -> None:
        """Have no such entries any more, without a word."""
        for key in keys:
            del self._entries[key]

    async def watch(self, prefix: str, revision: int, etcd_id: int) -> AsyncIterator[list[EtcdChange]]:
        """The changes that are put."""
        queue = self.changes[prefix] = asyncio.Queue()
        while True:
            yield await queue.get()


class Told:
    """Everything that the registry has told."""

    def __init__(self) -> None:
        self.engines: list[Engines] = []
        self.pins: list[Mapping[str, Document | None]] = []

    @property
    def followers(self) -> Followers:
        """They note what they hear."""
        return Followers(self.engines.append, self.pins.append, lambda _: None)


@asynccontextmanager
async def following(etcd: PlayedEtcd) -> AsyncIterator[tuple[EtcdRegistry, Told]]:
    registry, told = EtcdRegistry(cast(Etcd, etcd), "kv"), Told()
    await registry.start(told.followers)
    try:
        await settled()
        yield registry, told
    finally:
        await registry.close()


async def test_many_entries_are_told_some_at_a_time() -> None:
    """Four thousand that were read in one step, each with a warning, stopped the event loop for seconds."""
    entries = {f"kv/engines/e{at}": json.dumps({"url": f"http://h:{at + 1}"}).encode() for at in range(1000)}
    async with following(PlayedEtcd(entries)) as (_, told):
        assert len(told.engines) >= len(entries) // TOLD_AT_ONCE
        assert set(told.engines[-1]) == {f"e{at}" for at in range(1000)}


async def test_the_values_of_entries_are_not_kept() -> None:
    """Each orchestrator kept all that somebody wrote there, up to etcd's own bound of gigabytes."""
    etcd = PlayedEtcd({f"kv/pins/{at}": b"x" * 100_000 for at in range(10)})
    async with following(etcd) as (registry, told):
        assert told.pins == [{str(at): None for at in range(10)}]
        kept = [value for table in registry._tables for value in table._digests.values()]
        assert len(kept) == 10
        assert sum(map(len, kept)) < 1000
        etcd.changes["kv/pins/"].put_nowait([EtcdChange("kv/pins/1", b'{"engine": "a"}', 2)])
        etcd.changes["kv/pins/"].put_nowait([EtcdChange("kv/pins/1", b'{"engine": "a"}', 3)])
        await settled()
        assert told.pins[1:] == [{"1": {"engine": "a"}}], "a value that is put again has not changed"
        etcd.changes["kv/pins/"].put_nowait([EtcdChange("kv/pins/1", None, 4)])
        await settled()
        assert told.pins[2:] == [{"1": None}]


async def test_entries_that_are_too_many_or_have_too_long_names_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "ENTRIES_MAX", 10)
    etcd = PlayedEtcd({f"kv/pins/{at}": b"{}" for at in range(10)})
    async with following(etcd) as (registry, told):
        told.pins.clear()
        names = ["one more", "1" * (NAME_CHARACTERS_MAX + 1)]
        etcd.changes["kv/pins/"].put_nowait([EtcdChange(f"kv/pins/{name}", b"{}", 2) for name in names])
        etcd.changes["kv/pins/"].put_nowait([EtcdChange("kv/pins/0", None, 3)])
        await settled()
        assert told.pins == [{"0": None}]
        assert not any(name in table._digests for table in registry._tables for name in names)


@pytest.mark.parametrize("events", [{"events": "bind:ipc:///a", "topic": "t" * 16}, {"replay": "ipc:///a"}])
async def test_an_entry_names_no_file_of_this_host(events: Mapping[str, str]) -> None:
    """Whoever may write to etcd had an orchestrator put a socket of its own in the place of a storage server's."""
    near = {"url": "http://h:1", "name": "near", **events}
    far = {"url": "http://h:2", "events": "bind:tcp://0.0.0.0:5557", "topic": "t" * 16}
    etcd = PlayedEtcd(
        {f"kv/engines/{name}": json.dumps(each).encode() for name, each in (("near", near), ("far", far))}
    )
    async with following(etcd) as (registry, told):
        assert set(told.engines[-1]) == {"far"}
        with pytest.raises(ValueError, match="tcp://"):
            await registry.add(engine_settings(near))


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_engine_that_drains_keeps_the_settings_that_another_orchestrator_has_written(
    *, is_there: bool
) -> None:
    """They were acknowledged, and this one had not heard of them yet: it wrote those that it knew."""
    old, new = ({"url": "http://h:1", "name": "e", "requests_max": count} for count in (1, 2))
    key = "kv/engines/e"
    etcd = PlayedEtcd({key: json.dumps(old if not is_there else new).encode()})
    registry = EtcdRegistry(cast(Etcd, etcd), "kv")
    if not is_there:  # written between the reading and the change
        others = [new]
        etcd.while_changing = lambda: etcd.set(key, json.dumps(others.pop()).encode()) if others else None
    await registry.drain("e", is_wanted=True)
    assert etcd.document(key) == {**new, "is_draining": True}
    await registry.drain("e", is_wanted=False)
    assert etcd.document(key) == {**new, "is_draining": False}
    with pytest.raises(KeyError):
        await registry.drain("other", is_wanted=True)


async def test_an_engine_that_is_registered_anew_goes_on_draining() -> None:
    """As without a registry: an operator has taken it out of use."""
    etcd = PlayedEtcd({"kv/engines/junk": b"[1"})
    registry = EtcdRegistry(cast(Etcd, etcd), "kv")
    await registry.add(engine_settings({"url": "http://h:1", "name": "e"}))
    assert etcd.document("kv/engines/e")["is_draining"] is False
    await registry.drain("e", is_wanted=True)
    await registry.add(engine_settings({"url": "http://h:1", "name": "e", "requests_max": 3}))
    found = etcd.document("kv/engines/e")
    assert (found["is_draining"], found["requests_max"]) == (True, 3)
    await registry.add(engine_settings({"url": "http://h:2", "name": "junk"}))
    assert etcd.document("kv/engines/junk")["url"] == "http://h:2"


async def test_an_entry_that_others_change_all_the_time_is_an_error() -> None:
    key, value = "kv/engines/e", b'{"url": "http://h:1"}'
    etcd = PlayedEtcd({key: value})
    etcd.while_changing = lambda: etcd.set(key, value)
    with pytest.raises(MetadataError, match="all the time"):
        await EtcdRegistry(cast(Etcd, etcd), "kv").drain("e", is_wanted=True)


async def test_an_entry_of_a_later_release_takes_no_engine_away() -> None:
    """Its orchestrators registered the engines anew, and those of before had none, for as long as the upgrade took."""
    etcd = PlayedEtcd({"kv/engines/a": b'{"url": "http://a:1"}'})
    later = b'{"url": "http://a:2", "of_a_later_release": 1, "is_draining": true}'
    async with following(etcd) as (_, told):
        for key in ("kv/engines/a", "kv/engines/b"):
            await etcd.put(key, later)
        await until(lambda: len(told.engines) == 3)
        assert told.engines[-1] == {"a": (engine_settings({"url": "http://a:1", "name": "a"}), True)}
        await etcd.delete("kv/engines/a")
        await until(lambda: told.engines[-1] == {})


class NoChange:
    """A change that does not come."""

    def __init__(self, error: EtcdError) -> None:
        self._error = error

    @property
    def revision(self) -> int:
        """There is none."""
        raise self._error


async def test_an_answer_of_etcd_that_nobody_expects_does_not_end_the_following(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did where it came amid the reading behind a lost connection: no change was followed any more."""
    monkeypatch.setattr(registry_module, "back_off_s", lambda *_: 0.0)
    etcd = PlayedEtcd({"kv/pins/1": b'{"engine": "a"}'})
    async with following(etcd) as (_, told):
        read, asked_count = etcd.range, 0

        async def senseless(*_: object) -> EtcdRange:
            nonlocal asked_count
            asked_count += 1
            raise UnicodeError("an answer that nobody expects")

        monkeypatch.setattr(etcd, "range", senseless)
        etcd.changes["kv/pins/"].put_nowait([cast(EtcdChange, NoChange(EtcdError("lost")))])
        await until(lambda: asked_count > 0)
        monkeypatch.setattr(etcd, "range", read)
        etcd.set("kv/pins/2", b'{"engine": "b"}')
        await until(lambda: told.pins[-1] == {"2": {"engine": "b"}})


async def test_a_quiet_etcd_is_no_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each half minute without a change was warned of, and counted, so that later changes were followed 5 s late."""
    paused: list[int] = []
    monkeypatch.setattr(registry_module, "back_off_s", lambda failures, *_: paused.append(failures) or 0.0)
    etcd = PlayedEtcd({})
    async with following(etcd) as (_, told):
        for count in range(1, 4):
            etcd.changes["kv/pins/"].put_nowait([cast(EtcdChange, NoChange(QuietWatchError("nothing")))])
            await until(lambda expected=count: len(paused) == expected)
            await settled()
        assert paused == [1, 1, 1]
        assert not caplog.records
        etcd.changes["kv/pins/"].put_nowait([cast(EtcdChange, NoChange(EtcdError("lost")))])
        await until(lambda: len(paused) == 4)
        assert "stays as it was" in caplog.text
        etcd.set("kv/pins/2", b'{"engine": "b"}')
        etcd.changes["kv/pins/"].put_nowait([cast(EtcdChange, NoChange(QuietWatchError("nothing")))])
        await until(lambda: bool(told.pins) and told.pins[-1] == {"2": {"engine": "b"}})


@pytest.mark.parametrize(("etcd_id", "revision"), [(2, 9), (1, 3)], ids=["rebuilt", "an old snapshot"])
async def test_an_etcd_that_has_gone_back_takes_no_engine_away(
    etcd_id: int, revision: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty etcd took all engines from everybody, though each of them was well."""
    monkeypatch.setattr(registry_module, "back_off_s", lambda *_: 0.0)
    etcd = PlayedEtcd({f"kv/engines/{name}": json.dumps({"url": f"http://{name}:1"}).encode() for name in "abc"})
    etcd.revision = 5
    async with following(etcd) as (registry, told):
        etcd.etcd_id, etcd.revision = etcd_id, revision
        etcd.lose("kv/engines/a", "kv/engines/b")
        for _ in range(2):
            await read_anew(etcd)
        assert set(told.engines[-1]) == set("abc")
        assert caplog.text.count("2 entries under kv/engines/") == 1
        await registry.remove("a")
        await until(lambda: set(told.engines[-1]) == set("bc"))
        await registry.add(engine_settings({"url": "http://b:1", "name": "b"}))
        await read_anew(etcd)
        etcd.lose("kv/engines/b")
        await read_anew(etcd)
        assert set(told.engines[-1]) == {"c"}, "an entry that is missing later was deleted"


async def read_anew(etcd: PlayedEtcd) -> None:
    """Have the registry read all engines again."""
    asked = etcd.changes.pop("kv/engines/")
    asked.put_nowait([cast(EtcdChange, NoChange(QuietWatchError("nothing")))])
    await until(lambda: "kv/engines/" in etcd.changes)
    await settled()
