"""Ranks tell each other who they are, and each makes the same view of it; no MPI runs here."""

from __future__ import annotations

import json

import pytest

from descriptors.cluster import Member
from objectcache.adapters.membership import MembershipError
from objectcache.adapters.mpi_membership import RECORD_BYTES, record, view_of

A, B = Member("rank-1", "http://h1:9100"), Member("b", "https://h2:9100", 2.5)


def test_every_rank_makes_the_same_view_of_what_all_tell() -> None:
    records = [record(None, "0a"), record(A, "0b"), record(B, "0c")]
    assert {len(each) for each in records} == {RECORD_BYTES}
    view = view_of(records)
    assert view.id.cluster_id == "mpi-0a"
    assert view.number == 1
    assert view.members == (B, A)


def test_a_job_without_a_storage_server_is_no_cluster() -> None:
    with pytest.raises(MembershipError, match="no rank is a storage server"):
        view_of([record(None, "0a"), record(None, "0b")])


@pytest.mark.parametrize(
    "told",
    [
        b"\xff",
        b"[]",
        b"{}",
        b'{"cluster": "a"}',
        b'{"cluster": "a", "member": {"name": "a"}}',
        b'{"cluster": "a b", "member": null}',
        json.dumps({"cluster": "a", "member": {"name": "a", "endpoint": "http://h:1", "more": 1}}).encode(),
    ],
)
def test_what_makes_no_cluster_is_refused(told: bytes) -> None:
    with pytest.raises(MembershipError):
        view_of([told, record(A, "0a")])


def test_two_ranks_of_one_name_are_refused() -> None:
    with pytest.raises(MembershipError, match="one name"):
        view_of([record(A, "0a"), record(A, "0b")])


def test_a_record_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MembershipError, match="the most"):
        record(A, "x" * RECORD_BYTES)
