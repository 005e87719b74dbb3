"""Calls between a gateway and a storage server that name many keys leave the event loops of both to others."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from descriptors import peer_calls
from descriptors.cluster import Member, View
from descriptors.messages import LookupAnswer, LookupRequest, lookup_body, parse_lookup
from descriptors.peer_auth import PeerSecrets
from descriptors.placement import Placement
from gateway.cluster.members import Members
from gateway.cluster.prefixes import ClusterPrefixes
from gateway.storage_client import RemoteStorage
from objectcache.adapters.caller import CALLER
from objectcache.adapters.threads import HERE_ITEMS_MAX
from storage_server.service.http_api import StorageHttp
from tests.support.stores import listening

SECRETS = PeerSecrets(b"s" * 32)
KEYS = tuple(f"{index:064x}" for index in range(3 * HERE_ITEMS_MAX))


class PlayedStorage:
    """Counts all keys of a lookup, and notes for whom."""

    def __init__(self) -> None:
        self.prefixes = self
        self.callers: list[str] = []

    async def lookup(self, access_key: str, bucket: str, request: LookupRequest) -> LookupAnswer:
        self.callers.append(CALLER.get())
        return LookupAnswer(len(request.chunk_keys))

    async def claim(self, access_key: str, request_id: str) -> None:
        self.callers.append(CALLER.get())


class PlayedMembership:
    def __init__(self, *members: Member) -> None:
        self.view = View("kv", 1, members)

    def on_view(self, told: Any) -> None: ...


async def test_long_lookups_are_written_and_read_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 keys, which any client may sign, kept each loop for a tenth to a third of a second."""
    here: list[str] = []

    def noted(name: str, work: Any) -> Any:
        def call(*values: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                here.append(name)
            return work(*values)

        return call

    documents = {**peer_calls.DOCUMENTS, LookupRequest: (noted("write", lookup_body), noted("read", parse_lookup))}
    monkeypatch.setattr(peer_calls, "DOCUMENTS", documents)
    monkeypatch.setattr(Placement, "keepers", noted("place", Placement.keepers))
    storage: Any = PlayedStorage()
    async with listening(StorageHttp(storage, SECRETS).server()) as url:
        membership: Any = PlayedMembership(Member("a", url), Member("b", url.replace("127.0.0.1", "localhost")))
        members = Members(membership, lambda endpoint: RemoteStorage(endpoint, SECRETS))
        try:
            answer = await ClusterPrefixes(members).lookup("key", "bucket", LookupRequest(KEYS))
            assert answer.matched == len(KEYS)
            assert here == []
            await ClusterPrefixes(members).lookup("key", "bucket", LookupRequest(KEYS[:10]))
            assert {*here} == {"write", "read", "place"}  # a hand-over takes longer than so few
        finally:
            for member in membership.view.members:
                await (await members.storage(member)).close()


async def test_each_call_at_a_storage_server_is_its_caller_s() -> None:
    """Threads, queries and memory are shared out by callers: without one, each key would stand behind all others."""
    storage: Any = PlayedStorage()
    async with listening(StorageHttp(storage, SECRETS).server()) as url:
        remote = RemoteStorage(url, SECRETS)
        await remote.start()
        try:
            await remote.prefixes.claim("one", "r")
            await remote.prefixes.lookup("two", "bucket", LookupRequest(KEYS))
            await remote.prefixes.claim("three" + "x" * 20_000, "r")  # long arguments travel in the body
        finally:
            await remote.close()
    assert [caller[:5] for caller in storage.callers] == ["one", "two", "three"]
