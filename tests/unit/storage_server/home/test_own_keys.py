"""A storage server in a cluster: whose copies it trusts, and which calls it refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from descriptors.cluster import VIEW_HEADER, Member, View
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.placement import Placement, key_words
from objectcache.adapters.threads import HERE_ITEMS_MAX
from storage_server.home import own_keys
from storage_server.home.own_keys import OwnKeys
from tests.unit.played_time import PlayedTime

KEYS = [f"{index:064x}" for index in range(200)]
A, B, C = (Member(name, f"http://{name}:1") for name in "abc")


class PlayedMembership:
    """A Membership whose views and lease the test sets."""

    def __init__(self) -> None:
        self.view = View("kv", 0)
        self.changed_at = 0
        self.holds_lease = True
        self.registration_count = 1
        self.refresh_count = 0
        self._told: list[Callable[[View], None]] = []

    def on_view(self, told: Callable[[View], None]) -> None:
        self._told.append(told)

    def announce(self, own: Member) -> None: ...

    async def start(self) -> None: ...

    def show(self, number: int, *members: Member) -> None:
        self.view, self.changed_at = View("kv", number, members), number
        for told in self._told:
            told(self.view)

    async def refresh(self) -> None:
        self.refresh_count += 1

    async def close(self) -> None: ...


class Compared:
    """Counts comparisons with upstream, which the test lets end."""

    def __init__(self) -> None:
        self.count = 0
        self.may_end = asyncio.Event()
        self.fails = False

    async def __call__(self) -> None:
        self.count += 1
        await self.may_end.wait()
        if self.fails:
            raise ServerError(ErrorCode.INTERNAL_ERROR, "upstream is away")


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def kept_by(name: str, *members: Member) -> list[bool]:
    placement = Placement(View("kv", 1, members))
    return [placement.members[index].name == name for index in placement.keepers("bucket", KEYS).tolist()]


async def started(membership: PlayedMembership, compare: Compared) -> OwnKeys:
    own = OwnKeys(membership, "a", settle_s=0.0)
    await own.start(compare, "http://a:1")
    return own


async def test_no_copy_is_trusted_before_the_cache_was_compared_with_upstream() -> None:
    """While this server was away, others may have changed what it has."""
    membership, compare = PlayedMembership(), Compared()
    own = await started(membership, compare)
    membership.show(1, A, B)
    await turns()
    assert not (await own.are_own("bucket", KEYS)).any()
    compare.may_end.set()
    await turns()
    assert (await own.are_own("bucket", KEYS)).tolist() == kept_by("a", A, B)
    await own.close()


async def test_a_key_that_comes_back_is_trusted_after_the_next_comparison() -> None:
    membership, compare = PlayedMembership(), Compared()
    own = await started(membership, compare)
    membership.show(1, A, B)
    compare.may_end.set()
    await turns()
    compare.may_end.clear()
    membership.show(2, A, B, C)
    membership.show(3, A, B)
    await turns()
    all_along = [before and between for before, between in zip(kept_by("a", A, B), kept_by("a", A, B, C), strict=True)]
    assert (await own.are_own("bucket", KEYS)).tolist() == all_along
    assert all_along != kept_by("a", A, B)
    compare.may_end.set()
    await turns()
    assert (await own.are_own("bucket", KEYS)).tolist() == kept_by("a", A, B)
    await own.close()


async def test_a_member_that_flaps_makes_no_call_dearer_and_keeps_no_cache_from_being_trusted() -> None:
    """It joins and leaves every second, so no comparison has quiet before it."""
    membership, compare = PlayedMembership(), Compared()
    compare.may_end.set()
    own = await started(membership, compare)
    membership.show(1, A, B)
    for number in range(2, 500):
        membership.show(number, A, B, *((C,) if number % 2 else ()))
    await turns()
    membership.show(500, A, B, C)
    stable = [one and other for one, other in zip(kept_by("a", A, B), kept_by("a", A, B, C), strict=True)]
    assert (await own.are_own("bucket", KEYS)).tolist() in (stable, kept_by("a", A, B, C))
    assert any(stable)
    await own.close()


async def test_many_keys_are_placed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup of 65,536 keys would keep the event loop for a tenth of a second."""
    threads: set[int] = set()

    def noted(bucket: str, keys: Sequence[str]) -> object:
        threads.add(threading.get_ident())
        return key_words(bucket, keys)

    membership, compare = PlayedMembership(), Compared()
    compare.may_end.set()
    own = await started(membership, compare)
    membership.show(1, A, B)
    await turns()
    monkeypatch.setattr(own_keys, "key_words", noted)
    many = [f"{index:064x}" for index in range(HERE_ITEMS_MAX + 1)]
    assert (await own.are_own("bucket", many)).any()
    assert threading.get_ident() not in threads
    await own.close()


async def test_a_comparison_that_fails_is_made_again() -> None:
    membership, compare = PlayedMembership(), Compared()
    compare.fails = True
    compare.may_end.set()
    own = await started(membership, compare)
    membership.show(1, A)
    await turns()
    assert compare.count > 1
    assert not (await own.are_own("bucket", KEYS)).any()
    compare.fails = False
    await turns()
    assert (await own.are_own("bucket", KEYS)).all()
    await own.close()


async def test_without_its_lease_a_server_trusts_no_copy_and_changes_nothing() -> None:
    membership, compare = PlayedMembership(), Compared()
    compare.may_end.set()
    own = await started(membership, compare)
    membership.show(1, A)
    await turns()
    own.require_current("kv:1", "delete_object")
    membership.holds_lease = False
    assert not (await own.are_own("bucket", KEYS)).any()
    own.require_current("kv:1", "head_object")
    with pytest.raises(ServerError) as refused:
        own.require_current("kv:1", "delete_object")
    assert (refused.value.code, refused.value.field) == (ErrorCode.SLOW_DOWN, None)
    await own.close()


async def test_a_server_that_became_a_member_again_trusts_no_copy_until_the_next_comparison() -> None:
    """Its members look as before, but another server may have been the keeper meanwhile."""
    membership, compare = PlayedMembership(), Compared()
    compare.may_end.set()
    own = await started(membership, compare)
    membership.show(1, A)
    await turns()
    assert (await own.are_own("bucket", KEYS)).all()
    compare.may_end.clear()
    membership.registration_count = 2
    assert not (await own.are_own("bucket", KEYS)).any()
    compare.may_end.set()
    await turns()
    assert (await own.are_own("bucket", KEYS)).all()
    await own.close()


async def test_calls_under_an_older_view_or_of_another_cluster_are_refused() -> None:
    membership, compare = PlayedMembership(), Compared()
    own = await started(membership, compare)
    with pytest.raises(ServerError) as unknown:
        own.require_current("kv:1", "head_object")
    assert (unknown.value.code, unknown.value.field) == (ErrorCode.SLOW_DOWN, VIEW_HEADER)
    membership.show(5, A)
    own.require_current("kv:5", "head_object")
    with pytest.raises(ServerError) as stale:
        own.require_current("kv:4", "head_object")
    assert (stale.value.field, stale.value.retryable) == (VIEW_HEADER, True)
    with pytest.raises(CallerError) as other:
        own.require_current("other:9", "head_object")
    assert other.value.code is ErrorCode.ACCESS_DENIED
    for text in ("", "kv", "kv:x"):
        with pytest.raises(CallerError):
            own.require_current(text, "head_object")
    own.require_current("kv:9", "head_object")
    own.require_current("kv:9", "head_object")
    await turns()
    assert membership.refresh_count == 1
    await own.close()


async def test_a_member_that_joins_asks_those_who_kept_its_keys_before() -> None:
    """And one that was there all along asks the keeper of the view before; nobody asks itself, or one that is gone."""
    membership = PlayedMembership()
    own = OwnKeys(membership, "a", settle_s=60)  # type: ignore[arg-type]
    assert own.former_keeper("bucket", KEYS[0]) is None
    membership.show(2, A, B, C)
    others = Placement(View("kv", 2, (B, C)))
    for key in KEYS:
        former = own.former_keeper("bucket", key)
        assert former is not None
        assert former.name == others.order("bucket", key)[0].name
    membership.show(3, A, B)
    before = Placement(View("kv", 2, (A, B, C)))
    for key in KEYS:
        keeper = before.order("bucket", key)[0].name
        former = own.former_keeper("bucket", key)
        assert (None if former is None else former.name) == ("b" if keeper == "b" else None)
    await own.close()


async def test_long_after_a_change_nobody_else_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedTime()
    monkeypatch.setattr(own_keys, "time", played)
    membership = PlayedMembership()
    own = OwnKeys(membership, "a", settle_s=1e6)  # type: ignore[arg-type]
    membership.show(2, A, B, C)
    await played.passes(own_keys.FORMER_S - 1.0)
    assert own.former_keeper("bucket", KEYS[0]) is not None
    await played.passes(2.0)
    assert own.former_keeper("bucket", KEYS[0]) is None
    await own.close()
