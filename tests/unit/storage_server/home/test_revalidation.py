"""Which cached chunks are not upstream any more."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import ByteRange, ListPage, ListRequest, ObjectInfo, ReadHead, ReadRequest
from storage_server.home import revalidation
from storage_server.home.revalidation import Revalidation, just_before, stale_keys
from storage_server.home.rules.refusals import NoConnectionError


def test_another_etag_and_an_absent_key_are_stale_as_far_as_was_listed() -> None:
    cached = {"a": "1", "b": "2", "c": "3", "d": "4"}
    assert stale_keys(cached, {"a": "1", "b": "x"}, "c") == ["b", "c"]
    assert stale_keys(cached, {"a": "1", "b": "x"}, None) == ["b", "c", "d"]


@given(st.text(min_size=1, max_size=5))
def test_a_list_from_before_a_key_has_the_key(key: str) -> None:
    assert just_before(key) < key


class Service:
    """Objects in one bucket, listed in small pages."""

    def __init__(self, etags: dict[str, str]) -> None:
        self.etags = etags
        self.list_count = 0

    async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
        self.list_count += 1
        if request.bucket == "closed":
            raise CallerError(ErrorCode.ACCESS_DENIED, "not for this account", field="bucket")
        if request.bucket == "gone":
            raise CallerError(ErrorCode.NO_SUCH_BUCKET, "no such bucket", field="bucket")
        keys = sorted(key for key in self.etags if key > request.after)
        shown = keys[: request.max_keys]
        objects = [ObjectInfo(key, 1, self.etags[key], 0.0) for key in shown]
        return ListPage(objects, [], shown[-1] if len(keys) > len(shown) else None)

    async def head_object(self, access_key: str, request: ReadRequest) -> ReadHead:
        if request.key not in self.etags:
            raise CallerError(ErrorCode.NO_SUCH_KEY, "no such key", field="key")
        return ReadHead(ObjectInfo(request.key, 1, self.etags[request.key], 0.0), ByteRange(0, 1))


class Index:
    """What the cache has: bucket to keys to ETags."""

    def __init__(self, buckets: dict[str, dict[str, str]]) -> None:
        self.buckets = buckets

    async def threaded(self, query: Any) -> Any:
        known = query.keywords
        if query.func is revalidation.queries.buckets:
            return [SimpleNamespace(name=name) for name in sorted(self.buckets) if name > known["after"]]
        held = self.buckets[known["name"]]
        keys = sorted(key for key in held if key > known["start"])[: known["limit"]]
        return [SimpleNamespace(info=SimpleNamespace(key=key, etag=held[key]), version=1) for key in keys]


def name_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:6]


def numbered(number: int) -> str:
    """Before `k9`, and behind the text just before it, lie all of `k1` to `k89`."""
    return f"k{number}"


@pytest.mark.parametrize("name_of", [name_of, numbered])
@given(
    upstream=st.dictionaries(st.integers(0, 60), st.sampled_from("xy")),
    cached=st.dictionaries(st.integers(0, 60), st.sampled_from("xy")),
    page=st.integers(1, 7),
)
async def test_a_pass_finds_exactly_what_is_stale(
    name_of: Callable[[int], str], upstream: dict[int, str], cached: dict[int, str], page: int
) -> None:
    """However the pages of both sides lie, and it ends."""
    there = {name_of(number): etag for number, etag in upstream.items()}
    here = {name_of(number): etag for number, etag in cached.items()}
    service, index = Service(there), Index({"bucket": dict(here)})

    async def forget(bucket: str, versions: Any) -> int:
        for key in versions:
            del index.buckets[bucket][key]
        return len(versions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(revalidation, "KEYS_PER_PAGE", page)
        comparing = Revalidation(service, index, forget)  # type: ignore[arg-type]
        await comparing.compare_all()
    assert index.buckets["bucket"] == {key: etag for key, etag in here.items() if there.get(key) == etag}
    assert comparing.stale_count == len(here) - len(index.buckets["bucket"])
    assert service.list_count <= 2 * (len(there) + len(here)) + 1


async def test_a_bucket_that_is_gone_takes_its_chunks_along() -> None:
    index = Index({"gone": {"a": "1", "b": "2"}})

    async def forget(bucket: str, versions: Any) -> int:
        for key in versions:
            del index.buckets[bucket][key]
        return len(versions)

    await Revalidation(Service({}), index, forget).compare_all()  # type: ignore[arg-type]
    assert index.buckets == {"gone": {}}


async def test_a_bucket_whose_list_is_refused_holds_no_other_one_up() -> None:
    index = Index({"closed": {"a": "1"}, "gone": {"a": "1"}})

    async def forget(bucket: str, versions: Any) -> int:
        for key in versions:
            del index.buckets[bucket][key]
        return len(versions)

    with pytest.raises(CallerError, match="not for this account"):
        await Revalidation(Service({}), index, forget).compare_all()  # type: ignore[arg-type]
    assert index.buckets == {"closed": {"a": "1"}, "gone": {}}


async def test_a_bucket_that_upstream_is_too_busy_for_holds_no_other_one_up() -> None:
    """Copies in all buckets behind it stayed as they were for as long."""

    class Busy(Service):
        async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
            if request.bucket == "busy":
                raise ServerError(ErrorCode.SLOW_DOWN, "too many requests for this bucket", retryable=True)
            return await super().list_objects(access_key, request)

    removed: list[tuple[str, dict[str, int]]] = []

    async def forget(bucket: str, versions: dict[str, int]) -> int:
        removed.append((bucket, versions))
        return len(versions)

    index: Any = Index({"busy": {"a": "old"}, "closed": {"a": "old"}, "other": {"a": "old"}})
    service: Any = Busy({"a": "new"})
    forgetting: Any = forget
    with pytest.raises(ServerError) as busy:
        await Revalidation(service, index, forgetting).compare_all()
    assert busy.value.code is ErrorCode.SLOW_DOWN
    assert removed == [("other", {"a": 1})]


async def test_a_service_that_nobody_can_connect_to_is_asked_about_one_bucket() -> None:
    asked: list[str] = []

    class Gone(Service):
        async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
            asked.append(request.bucket)
            raise NoConnectionError("refused")

    index: Any = Index({"a": {"a": "old"}, "b": {"a": "old"}})
    service: Any = Gone({})
    nothing: Any = None
    with pytest.raises(NoConnectionError):
        await Revalidation(service, index, nothing).compare_all()
    assert asked == ["a"]


class Circling(Service):
    """A list whose pages are empty, and lead back to its start."""

    async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
        self.list_count += 1
        if self.list_count > len(self.etags) + 1:
            pytest.fail("the list has no end")
        return ListPage([], [], "")


async def test_a_list_that_leads_nowhere_ends_the_pass_and_removes_nothing() -> None:
    held = {name_of(number): "x" for number in range(5)}
    service, index = Circling(held), Index({"bucket": dict(held)})

    async def forget(bucket: str, versions: Any) -> int:
        raise AssertionError("nothing is known to be stale")

    await Revalidation(service, index, forget).compare_all()  # type: ignore[arg-type]
    assert index.buckets == {"bucket": held}


async def test_a_start_waits_until_upstream_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal on a bad sector is waited for 30 s in each process, so that no server would ever start."""
    monkeypatch.setattr(revalidation, "RETRY_S", 0.0)

    class Busy(Service):
        async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
            page = await super().list_objects(access_key, request)
            if self.list_count < 3:
                raise ServerError(ErrorCode.SLOW_DOWN, "busy", retryable=True)
            return page

    forgotten: list[str] = []

    async def forget(bucket: str, versions: Any) -> int:
        forgotten.extend(versions)
        return len(versions)

    await Revalidation(Busy({}), Index({"bucket": {"a": "1"}}), forget).compare_first()  # type: ignore[arg-type]
    assert forgotten == ["a"]
