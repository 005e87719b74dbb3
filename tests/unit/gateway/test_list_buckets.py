"""ListBuckets looks at a bounded number of buckets at a time, and holds those that its caller sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import BUCKETS_LISTED_MAX, BucketInfo
from gateway.operations import buckets
from gateway.s3.credentials import Credential
from objectcache.adapters.document_budget import DocumentBudget

KEY = "OWNERKEY"


class Stored:
    """So many buckets, of which each call gives as many as it asks for."""

    def __init__(self, count: int, *, gives_all: bool = False) -> None:
        self._buckets = [BucketInfo(f"b{number:06d}", 0.0, KEY) for number in range(count)]
        self._gives_all = gives_all
        self.asked: list[tuple[str, int]] = []

    async def list_buckets(self, access_key: str, after: str = "", most: int = BUCKETS_LISTED_MAX) -> list[BucketInfo]:
        self.asked.append((after, most))
        if self._gives_all:
            return self._buckets
        return [bucket for bucket in self._buckets if bucket.name > after][:most]


def call_of(stored: Stored, documents: DocumentBudget, patterns: tuple[str, ...] = ("*",), **parameters: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in parameters.items()}
    return SimpleNamespace(
        request=SimpleNamespace(parameters=named),
        settings=SimpleNamespace(region="us-east-1"),
        credential=Credential(KEY, "secret-secret", buckets=patterns),
        documents=documents,
        storage=SimpleNamespace(objects=stored),
        access_key=KEY,
    )


async def listed(call: Any) -> tuple[list[str], str]:
    root = ElementTree.fromstring((await buckets.list_buckets(call)).body)
    names = [each.text or "" for each in root.iter() if each.tag.endswith("Name")]
    token = next((each.text or "" for each in root.iter() if each.tag.endswith("ContinuationToken")), "")
    return [name for name in names if name.startswith("b")], token


def budget(key_bytes: int = 64 << 20) -> DocumentBudget:
    return DocumentBudget(4 * key_bytes, key_bytes)


async def test_no_call_asks_for_more_than_a_list_has() -> None:
    """A key had made 250,000 buckets: forty lists at once took 1.3 GB, and the event loop stood still for 1.7 s."""
    stored, documents = Stored(25_000), budget()
    names, token = await listed(call_of(stored, documents))
    assert len(names) == BUCKETS_LISTED_MAX
    assert token
    assert {most for _, most in stored.asked} == {BUCKETS_LISTED_MAX}
    assert documents.held_bytes == 0


async def test_a_key_sees_the_few_that_it_may_among_any_number_of_others() -> None:
    stored, documents = Stored(25_000), budget(buckets.BUCKET_BYTES * 4)
    assert await listed(call_of(stored, documents, ("b000007", "b024999"))) == (["b000007", "b024999"], "")
    assert documents.held_bytes == 0


@pytest.mark.parametrize("gives_all", [False, True], ids=["", "a release before gives all"])
async def test_pages_go_on_where_the_one_before_ended(gives_all: bool) -> None:
    stored, found, token = Stored(7, gives_all=gives_all), list[str](), ""
    while len(found) < 7:
        names, token = await listed(call_of(stored, budget(), max_buckets="2", continuation_token=token))
        found += names
    assert found == [f"b{number:06d}" for number in range(7)]
    assert not token


async def test_a_prefix_is_where_a_list_begins_and_ends() -> None:
    stored = Stored(25_000)
    names, _ = await listed(call_of(stored, budget(), prefix="b0199", max_buckets="1000"))
    assert names == [f"b{number:06d}" for number in range(19_900, 20_000)]
    assert stored.asked == [("b019", 1001)]


async def test_what_a_key_is_shown_counts_among_its_documents() -> None:
    documents = budget(buckets.BUCKET_BYTES * 99)
    with pytest.raises(ServerError) as refused:
        await buckets.list_buckets(call_of(Stored(100), documents))
    assert refused.value.code is ErrorCode.SLOW_DOWN
    assert documents.held_bytes == 0
