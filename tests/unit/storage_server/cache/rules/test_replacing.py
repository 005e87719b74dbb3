"""The books of a cache know which objects are to be replaced by encoded ones, and how that ended."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from descriptors.kv_forms import KvLayout
from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.ladder import ChunkForm, Ladder, Rung
from storage_server.cache.rules.books import Books
from storage_server.cache.rules.entry import Entry, Name
from storage_server.cache.rules.replacing import Replacement

BUCKET = "cached"
FORM = ChunkForm(KvLayout(1, 16, 64, "bfloat16"))
RUNGS = {
    Codec.EXACT: Rung(Codec.EXACT, 9, 0), Codec.KIVI8: Rung(Codec.KIVI8, 5, 3), Codec.KIVI4: Rung(Codec.KIVI4, 3, 6)
}  # fmt: skip


def ladder(name: Name, form: ChunkForm, refused: Collection[Codec]) -> Ladder:
    present = form.chain[-1] if form.chain else Codec.EXACT
    below = list(RUNGS)[list(RUNGS).index(present) :]
    return tuple(RUNGS[codec] for codec in below if codec is present or codec not in refused)


def entry(at: float, version: int = 1, nbytes: int = 9, **known: object) -> Entry:
    return Entry(version, nbytes, at, at, form=FORM, **known)  # type: ignore[arg-type]


def filled(text: str, eviction: Eviction = Eviction.LRU, ttl_s: float | None = None) -> Books:
    books = Books(policy_of(eviction, 100), ttl_s, ladder=ladder)
    for number, key in enumerate(text):
        books.put((BUCKET, key), entry(float(number)))
    return books


def told(books: Books) -> list[tuple[str, Codec]]:
    return [(each.key, each.codec) for each in books.replacing.told()]


def one(books: Books, capacity_bytes: int) -> Replacement:
    assert books.leaving(capacity_bytes, 10.0) == []
    (found,) = books.replacing.told()
    return found


def replaced(replacement: Replacement, version: int = 2, at: float = 11.0) -> Entry:
    form = ChunkForm(FORM.layout, (replacement.codec,))
    return Entry(version, replacement.nbytes, at, at, form=form, replaced_version=replacement.entry.version)


def test_objects_are_encoded_before_they_leave_and_count_as_what_they_will_take() -> None:
    books = filled("abc")
    assert books.leaving(20, 10.0) == []
    assert told(books) == [("a", Codec.KIVI8), ("b", Codec.KIVI8)]
    assert told(books) == []
    assert books.used_bytes == 19
    assert books.leaving(9, 10.0) == []
    assert sorted(told(books)) == [("a", Codec.KIVI4), ("b", Codec.KIVI4), ("c", Codec.KIVI4)]
    assert [victim.key for victim in books.leaving(6, 10.0)] == ["a"]


def test_what_replaced_an_object_has_its_uses_its_parent_and_its_lease() -> None:
    books = filled("a")
    books.put((BUCKET, "b"), entry(1.0, parent="a"))
    books.use(BUCKET, ["a", "b"], 5.0)
    replacement = one(books, 14)
    assert replacement.key == "b"
    books.lease(BUCKET, ["b"], 50.0)
    books.put((BUCKET, "b"), replaced(replacement))
    assert books.held.nbytes == 5
    found = books.leaving(0, 60.0)
    assert told(books) == []
    uses = [(victim.key, victim.entry.use_count, victim.entry.parent) for victim in found]
    assert uses == [("b", 2, "a"), ("a", 2, None)]
    last = found[0].entry
    assert (last.version, last.nbytes, last.form) == (2, 5, ChunkForm(FORM.layout, (Codec.KIVI8,)))


@pytest.mark.parametrize("eviction", Eviction)
def test_an_object_that_somebody_holds_meanwhile_stays_as_it_is(eviction: Eviction) -> None:
    books = filled("a", eviction)
    replacement = one(books, 5)
    assert books.replacing.may_replace(replacement)
    books.lease(BUCKET, ["a"], 50.0)
    assert not books.replacing.may_replace(replacement)
    assert books.used_bytes == 9
    assert (books.leaving(5, 20.0), told(books)) == ([], [])
    assert (books.leaving(5, 60.0), told(books)) == ([], [("a", Codec.KIVI8)])


@pytest.mark.parametrize("eviction", Eviction)
def test_a_codec_that_an_object_is_refused_is_not_tried_again(eviction: Eviction) -> None:
    books = filled("a", eviction)
    books.replacing.keep(one(books, 5), is_refused=True)
    assert books.used_bytes == 9
    second = one(books, 5)
    assert second.codec is Codec.KIVI4
    books.replacing.keep(second, is_refused=True)
    assert [victim.key for victim in books.leaving(5, 10.0)] == ["a"]


def test_another_object_of_the_key_ends_what_was_wanted() -> None:
    books = filled("a")
    replacement = one(books, 5)
    books.put((BUCKET, "a"), entry(20.0, version=7))
    assert books.used_bytes <= 9
    assert not books.replacing.may_replace(replacement)
    books.replacing.keep(replacement, is_refused=True)
    assert books.replacing.give_up(replacement) is None
    assert told(books) in ([], [("a", Codec.KIVI8)])


def test_what_is_given_up_leaves_unless_a_child_of_it_is_there() -> None:
    books = filled("a")
    books.put((BUCKET, "b"), entry(1.0, parent="a"))
    books.use(BUCKET, ["a", "b"], 5.0)
    assert books.leaving(10, 10.0) == []
    child, parent = sorted(books.replacing.told(), key=lambda each: each.key, reverse=True)
    assert books.replacing.give_up(parent) is None
    assert books.used_bytes == 14
    victim = books.replacing.give_up(child)
    assert victim is not None
    assert (victim.key, victim.entry.nbytes, books.used_bytes) == ("b", 9, 9)
    assert [each.key for each in books.leaving(5, 10.0)] == ["a"]  # it was given up, and is not tried again


def test_an_object_that_was_deleted_or_whose_time_has_come_is_not_replaced() -> None:
    books = filled("ab", ttl_s=30.0)
    assert books.leaving(10, 10.0) == []
    first, second = books.replacing.told()
    books.remove((BUCKET, "a"))
    assert not books.replacing.may_replace(first)
    assert [victim.key for victim in books.leaving(10, 100.0)] == ["b"]
    assert not books.replacing.may_replace(second)
    assert books.used_bytes == 0


def test_an_object_that_has_become_smaller_by_another_codec_counts_as_it_is() -> None:
    """The policy has gone on meanwhile."""
    books = filled("a")
    first = one(books, 5)
    second = one(books, 3)
    books.put((BUCKET, "a"), replaced(first))
    assert books.used_bytes == 5
    assert not books.replacing.may_replace(second)
    assert one(books, 3).codec is Codec.KIVI4


def test_after_a_restart_objects_go_on_from_their_forms() -> None:
    books = Books(policy_of(Eviction.REUSE_VALUE, 1 << 62), ladder=ladder)
    encoded = Entry(2, 5, 1.0, 1.0, form=ChunkForm(FORM.layout, (Codec.KIVI8,)))
    books.restore([((BUCKET, "a"), encoded), ((BUCKET, "b"), entry(2.0))], 20.0)
    books.end_restore()
    assert books.leaving(8, 20.0) == []
    assert sorted(told(books)) == [("a", Codec.KIVI4), ("b", Codec.KIVI8)]


def test_dirty_objects_and_those_without_a_form_are_evicted_as_ever() -> None:
    books = Books(policy_of(Eviction.LRU, 100), ladder=ladder)
    books.put((BUCKET, "a"), Entry(1, 9, 0.0, 0.0))
    assert [victim.key for victim in books.leaving(5, 10.0)] == ["a"]
