"""Offers of memory: what a server reads of them, and what a mistake says."""

from __future__ import annotations

import json

import pytest

from descriptors.descriptor import ADDRESS_MAX
from descriptors.shm_messages import MESSAGE_BYTES_MAX, RegionOffer, offer_message, parse_offer


def test_an_offer_is_read_as_it_was_written() -> None:
    for offer in (RegionOffer("kv.1_a-b", 1), RegionOffer("k" * 64, ADDRESS_MAX)):
        assert parse_offer(offer_message(offer)) == offer


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"null",
        b"{}",
        b'{"region_id":"kv"}',
        b'{"region_id":"kv","length":1,"more":1}',
        b'{"region_id":"kv","length":true}',
        b'{"region_id":"kv","length":1.0}',
        b'{"region_id":"kv","length":NaN}',
        b'{"region_id":"kv","length":"1"}',
        b'{"region_id":"kv","length":-1}',
        b'{"region_id":"kv","length":%d}' % (ADDRESS_MAX + 1),
        b'{"region_id":"kv","length":' + b"9" * 4000 + b"}",
        b'{"region_id":["kv"],"length":1}',
        b'{"region_id":"\\ud800","length":1}',
        b'{"region_id":"\xff","length":1}',
        '{"region_id":"kv","length":1}'.encode("utf-16"),
        b"[" * MESSAGE_BYTES_MAX,
        b'{"region_id":' * 300,
    ],
)
def test_anything_else_is_no_offer(message: bytes) -> None:
    with pytest.raises(ValueError, match="not an offer"):
        parse_offer(message)


def test_a_message_of_many_mistakes_names_one() -> None:
    """A text about each of six hundred takes milliseconds of the event loop to write."""
    message = json.dumps({f"{index:x}": 1 for index in range(400)}).encode()
    assert len(message) <= MESSAGE_BYTES_MAX
    with pytest.raises(ValueError, match="not an offer") as refused:
        parse_offer(message)
    assert len(str(refused.value)) < 200
