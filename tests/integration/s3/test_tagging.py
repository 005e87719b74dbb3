"""Object tags."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.s3_calls import fresh_bucket, refused, status_of
from tests.support.servers import Stack


@pytest.fixture
def bucket(servers: Stack) -> str:
    return fresh_bucket(servers)


def tag_set(**tags: str) -> dict[str, Any]:
    return {"TagSet": [{"Key": key, "Value": value} for key, value in tags.items()]}


def test_tags_are_set_replaced_and_taken_away(servers: Stack, bucket: str) -> None:
    """The object itself stays as it is: same ETag, same time."""
    s3, name = servers.s3(), {"Bucket": bucket, "Key": "k"}
    s3.put_object(**name, Body=b"x")
    before = s3.head_object(**name)
    assert s3.get_object_tagging(**name)["TagSet"] == []
    s3.put_object_tagging(**name, Tagging=tag_set(b="2", a="1", empty=""))
    assert s3.get_object_tagging(**name)["TagSet"] == tag_set(a="1", b="2", empty="")["TagSet"]
    assert s3.get_object(**name)["TagCount"] == 3
    s3.put_object_tagging(**name, Tagging=tag_set(c="3"))
    assert s3.get_object_tagging(**name)["TagSet"] == tag_set(c="3")["TagSet"]
    assert status_of(s3.delete_object_tagging(**name)) == 204
    assert s3.get_object_tagging(**name)["TagSet"] == []
    after = s3.head_object(**name)
    assert (after["ETag"], after["LastModified"]) == (before["ETag"], before["LastModified"])
    assert "TagCount" not in after
    for call in (s3.get_object_tagging, s3.delete_object_tagging):
        assert refused(call, Bucket=bucket, Key="absent") == (404, "NoSuchKey")
    assert refused(s3.put_object_tagging, Bucket=bucket, Key="absent", Tagging=tag_set()) == (404, "NoSuchKey")


def test_tags_come_with_the_object(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket=bucket, Key="k", Body=b"x", Tagging="a=1&sp%20ace=%C3%A9+x&none")
    tags = {"a": "1", "none": "", "sp ace": "\u00e9 x"}
    assert s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == tag_set(**tags)["TagSet"]
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    assert s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == []
    answer = refused(s3.put_object, Bucket=bucket, Key="k", Body=b"y", Tagging="a=1&a=2")
    assert answer == (400, "InvalidTag")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"


@pytest.mark.parametrize(
    "tags",
    [
        {str(number): "" for number in range(11)},
        {"k" * 129: ""},
        {"k": "v" * 257},
        {"aws:reserved": "v"},
        {"bad#": "v"},
        {"k": "v\n"},
    ],
    ids=["eleven", "long-key", "long-value", "reserved", "character", "control"],
)
def test_tags_out_of_bounds_are_refused(servers: Stack, bucket: str, tags: dict[str, str]) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    answer = refused(s3.put_object_tagging, Bucket=bucket, Key="k", Tagging=tag_set(**tags))
    assert answer == (400, "InvalidTag")
    most = {str(number) * 128 if number < 10 else "": "v" * 256 for number in range(10)}
    s3.put_object_tagging(Bucket=bucket, Key="k", Tagging=tag_set(**most))


def test_a_tagging_document_is_checked(servers: Stack, bucket: str) -> None:
    servers.s3().put_object(Bucket=bucket, Key="k", Body=b"x")
    twice = b"<Tagging><TagSet>" + 2 * b"<Tag><Key>a</Key><Value>1</Value></Tag>" + b"</TagSet></Tagging>"
    nameless = twice.replace(b"<Key>a</Key>", b"<Key></Key>")
    for body, code in [
        (b"", "MalformedXML"),
        (b"<Tagging/>", "MalformedXML"),
        (twice, "InvalidTag"),
        (nameless, "InvalidTag"),
    ]:
        assert servers.request("PUT", f"/{bucket}/k?tagging", body=body).code == code
