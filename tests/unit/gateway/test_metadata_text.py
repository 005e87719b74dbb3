"""Metadata that every client can read."""

from __future__ import annotations

from email.header import decode_header
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError
from descriptors.objects import Attributes, ObjectInfo
from gateway.s3.object_headers import expiration_header, object_headers, stored_headers


def answered(headers: dict[str, str]) -> dict[str, str]:
    return object_headers(ObjectInfo("key", 1, "etag", 1.0, Attributes(headers)))


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30))
def test_a_value_is_ascii_in_an_answer_and_has_all_its_text(value: str) -> None:
    got = answered(stored_headers({"x-amz-meta-name": value}))["x-amz-meta-name"]
    assert got.isascii()
    if value.isascii():
        assert got == value
    else:
        ((word, charset),) = decode_header(got)
        assert (word.decode(), charset) == (value, "utf-8")


@given(st.text(max_size=30))
def test_a_rule_of_any_name_is_told_in_ascii(rule_id: str) -> None:
    """A service upstream may name its rules with bytes that are no text."""
    header = expiration_header((1_445_558_400.0, rule_id))["x-amz-expiration"]
    assert header.isascii()
    if rule_id.isascii():
        name = header.partition('rule-id="')[2].removesuffix('"')
        assert unquote(name) == rule_id


def test_a_name_that_no_answer_can_have_is_refused_and_counted_where_it_is_kept_already() -> None:
    with pytest.raises(CallerError, match="ASCII"):
        stored_headers({"x-amz-meta-é": "v"})
    for name in ("x-amz-meta-a b: c", "x-amz-meta-a: q", "x-amz-meta-a\tb", 'x-amz-meta-"', "x-amz-meta-a\r\nb"):
        with pytest.raises(CallerError, match="tokens"):
            stored_headers({name: "v"})
    headers = answered({"x-amz-meta-é": "v", "x-amz-meta-a b: c": "v", "x-amz-meta-a": "b"})
    assert headers["x-amz-missing-meta"] == "2"
    assert all(name.isascii() for name in headers)
    assert "x-amz-missing-meta" not in answered({"x-amz-meta-a": "b"})
