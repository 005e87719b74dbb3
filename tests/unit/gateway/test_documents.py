"""Documents are bounded before they are parsed."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import tracemalloc
from unittest import mock

import pytest

from adapters import threads
from descriptors import json_body
from descriptors.descriptor import DESCRIPTOR_BYTES_MAX
from descriptors.descriptor_codec import decode_descriptor
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.json_body import CONTAINERS_MAX, VALUES_MAX, shape_problem
from descriptors.messages import parse_lookup
from gateway.document_budget import DocumentBudget
from gateway.s3 import xml_tree
from gateway.s3.xml_in import (
    parse_acl,
    parse_complete,
    parse_create_bucket,
    parse_delete,
    parse_lifecycle,
    parse_tagging,
)

XML = [
    (parse_delete, "Delete"),
    (parse_complete, "CompleteMultipartUpload"),
    (parse_tagging, "Tagging"),
    (parse_create_bucket, "CreateBucketConfiguration"),
    (parse_lifecycle, "LifecycleConfiguration"),
    (lambda body: parse_acl(body, "owner"), "AccessControlPolicy"),
]


def nothing_parses(*_: object, **__: object) -> None:
    raise AssertionError("the document was parsed")


@pytest.mark.parametrize(
    "body",
    [
        b'{"chunk_keys":[' + b"[]," * (DESCRIPTOR_BYTES_MAX // 3 - 20) + b"1]}",
        b'{"chunk_keys":[' + b"1," * (DESCRIPTOR_BYTES_MAX // 2 - 20) + b"1]}",
        b'{"a":' * (CONTAINERS_MAX + 1),
        b'{"chunk_keys":[' + b'"\\"[",' * (VALUES_MAX + 1) + b"1]}",
    ],
    ids=["lists", "numbers", "nested", "strings"],
)
def test_a_document_of_too_many_values_is_refused_before_it_is_parsed(body: bytes) -> None:
    """Small values on the wire are large ones in memory: 16 MiB of empty lists took 3 GiB and 17 s."""
    with mock.patch.object(json_body, "_parsed", nothing_parses), pytest.raises(CallerError) as refused:
        decode_descriptor(body)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_DESCRIPTOR, "body")


def test_brackets_and_commas_in_keys_are_text() -> None:
    """They are not counted as values, escaped quotes around them or not."""
    keys = [f'\\"[{{,{index}' + "[,]" * 40 for index in range(4000)]
    body = json.dumps({"chunk_keys": keys}).encode()
    assert body.count(b",") > VALUES_MAX
    assert shape_problem(body) is None
    assert parse_lookup(body).chunk_keys == tuple(keys)


@pytest.mark.parametrize("text", ["\U0001f600" * 40_000, "\\" * 9 + '"[' * 50_000, "é" * 90_000])
def test_a_document_of_one_long_text_is_parsed_as_json_says(text: str) -> None:
    for escapes in (True, False):
        with pytest.raises(CallerError) as refused:
            parse_lookup(json.dumps({"chunk_keys": ["a", text]}, ensure_ascii=escapes).encode())
        assert refused.value.field == "chunk_keys[1]"


def test_a_refusal_does_not_repeat_the_document() -> None:
    """Each field that was missing cost a copy of all the others."""
    body = json.dumps({"chunk_keys": [f"{index:064x}" for index in range(60_000)]}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(CallerError) as refused:
            decode_descriptor(body)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(body)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(("parse", "root"), XML, ids=[root for _, root in XML])
@pytest.mark.parametrize("piece", ["\U0001f600&amp;", "a<!-- -->\U0001f600", "é\n", "<![CDATA[\U0001f600]]>"])
def test_text_of_xml_takes_time_in_proportion_to_its_length(parse: object, root: str, piece: str) -> None:
    """Appending to a string copies it when it holds wide characters: 3 MiB in one element stopped everybody for 90 s.
    What is counted here is how often text is joined, which a timing would only show on a quiet machine.
    """
    body = f"<{root}>{piece * 100_000}</{root}>".encode()
    began_s = time.process_time()
    with contextlib.suppress(CallerError):
        parse(body)  # type: ignore[operator]
    assert time.process_time() - began_s < 5


def test_pieces_of_text_make_one_text() -> None:
    tree = xml_tree.parse_tree(b"<a>1<b>2<!-- -->3&amp;<c/>4</b>5<![CDATA[6]]></a>", "a")
    assert (tree.text, tree.children[0].text) == ("156", "23&4")


def test_a_tag_without_end_is_refused() -> None:
    """expat takes a tag with all its attributes in one step, which nothing interrupts."""
    attributes = b" ".join(b'a%d=">"' % index for index in range(20_000))
    with pytest.raises(CallerError) as refused:
        parse_delete(b"<Delete " + attributes + b"><Object><Key>k</Key></Object></Delete>")
    assert refused.value.code is ErrorCode.MALFORMED_XML


async def test_a_large_document_is_parsed_beside_the_event_loop() -> None:
    here = threading.get_ident()
    assert await threads.parsed(lambda _: threading.get_ident(), b"small") == here
    assert await threads.parsed(lambda _: threading.get_ident(), bytes(threads.HERE_BYTES_MAX + 1)) != here


def test_a_budget_bounds_each_key_and_all() -> None:
    budget = DocumentBudget(total_bytes=100, key_bytes=60)
    budget.take("a", 60)
    for key, nbytes in (("a", 1), ("b", 41)):
        with pytest.raises(ServerError) as refused:
            budget.take(key, nbytes)
        assert refused.value.code is ErrorCode.SLOW_DOWN
    budget.take("b", 40)
    budget.give_back("a", 60)
    budget.take("b", 20)
    budget.give_back("b", 60)
    assert budget.held_bytes == 0
