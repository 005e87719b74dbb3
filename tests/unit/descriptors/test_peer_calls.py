"""Calls of a StorageApi: what each one is about, and roles that are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from descriptors.objects import CopyRequest, ListRequest, PartRequest, ReadRequest, UploadRef
from descriptors.peer_calls import CALLS, PeerCall, role_of
from descriptors.storage_api import ROLES

READ, UPLOAD = ReadRequest("bbb", "key"), UploadRef("bbb", "key", "id")


@pytest.mark.parametrize(
    ("operation", "arguments", "about"),
    [
        ("objects.head_object", {"request": READ}, ("bbb", "key")),
        ("objects.copy_object", {"request": CopyRequest(ReadRequest("other", "source"), "bbb", "key")}, ("bbb", "key")),
        ("objects.delete_object", {"bucket": "bbb", "key": "key"}, ("bbb", "key")),
        ("objects.list_objects", {"request": ListRequest("bbb")}, ("bbb", "")),
        ("objects.list_buckets", {}, ("", "")),
        ("uploads.put_part", {"request": PartRequest(UPLOAD, 1, 5)}, ("bbb", "key")),
        ("uploads.abort_upload", {"upload": UPLOAD}, ("bbb", "key")),
        ("prefixes.claim", {"request_id": "id"}, ("", "")),
    ],
)
def test_a_call_says_which_bucket_and_key_it_is_about(
    operation: str, arguments: dict[str, Any], about: tuple[str, str]
) -> None:
    assert CALLS[operation].about(arguments) == about


@pytest.mark.parametrize("name", ROLES)
def test_a_made_role_has_all_calls_of_the_role_and_no_other(name: str) -> None:
    def made(call: PeerCall) -> Callable[..., str]:
        return lambda: call.operation

    role = role_of(name, made)
    for call in CALLS.values():
        if call.role == name:
            assert getattr(role, call.method)() == call.operation
        else:
            assert not hasattr(role, call.method)
