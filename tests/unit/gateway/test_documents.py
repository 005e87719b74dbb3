"""Documents are bounded before they are parsed."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock
from xml.parsers import expat

import pytest

from descriptors import json_body
from descriptors.descriptor import DESCRIPTOR_BYTES_MAX, Descriptor
from descriptors.descriptor_codec import KEY_PREFIX_BYTES_MAX, decode_descriptor, encode_binary
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.json_body import CONTAINERS_MAX, VALUES_MAX, shape_problem
from descriptors.messages import parse_lookup, parse_registration, parse_renewal
from descriptors.units import MIB
from gateway.s3 import xml_tree
from gateway.s3.xml_in import (
    parse_acl,
    parse_complete,
    parse_create_bucket,
    parse_delete,
    parse_lifecycle,
    parse_tagging,
)
from objectcache.adapters import threads
from objectcache.adapters.document_budget import DocumentBudget

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
    with pytest.raises(CallerError) as refused:
        decode_descriptor(body)
    assert peak_bytes_of(decode_descriptor, body) < 4 * len(body)
    assert len(str(refused.value)) < 200


def peak_bytes_of(parse: Callable[[bytes], object], body: bytes) -> int:
    """The most memory that parsing, or refusing, the document takes beside the document itself."""
    tracemalloc.start()
    try:
        with contextlib.suppress(CallerError):
            parse(body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


HEAD = b'{"version":1,"num_layers":1,"chunk_tokens":1,"per_layer_chunk_bytes":1,"chunk_keys":['
ROOM = DESCRIPTOR_BYTES_MAX - 300
LONG_KEYS = {
    "text": b'"' + b"a" * ROOM + b'"',
    "wide text": b'"' + "\U0001f600".encode() + b"a" * ROOM + b'"',
    "escapes": b'"' + b"\\n" * (ROOM // 2) + b'"',
    "wide escapes": b'"' + "\U0001f600".encode() + b"\\n" * (ROOM // 2) + b'"',
    "surrogates": b'"' + b"\\ud83d\\ude00" * (ROOM // 12) + b'"',
    "number": b"1" * ROOM,
    "fraction": b"1." + b"1" * ROOM,
    "spaces": b" " * ROOM + b"1",
    "keys": b",".join(b'"%0200d"' % index for index in range(65_536)),
    "wide keys": b",".join(b'"%0200d\xf0\x9f\x98\x80"' % index for index in range(65_536)),
    "too many keys": (b'"' + b"a" * 110 + b'",') * (VALUES_MAX - 10) + b'""',
    "short keys": b'"ab",' * (VALUES_MAX - 10) + b'""',
    "fractions": b"1.5," * (VALUES_MAX - 10) + b"1",
    "lists": b"[]," * (CONTAINERS_MAX - 10) + b"1",
}


@pytest.mark.parametrize("content", LONG_KEYS.values(), ids=LONG_KEYS)
@pytest.mark.parametrize(
    ("parse", "head"), [(decode_descriptor, HEAD), (parse_lookup, b'{"chunk_keys":[')], ids=["descriptor", "lookup"]
)
def test_json_takes_a_few_times_its_size(parse: Callable[[bytes], object], head: bytes, content: bytes) -> None:
    """Or, of a small document, no more than its greatest number of values."""
    body = head + content + b"]}"
    assert len(body) <= DESCRIPTOR_BYTES_MAX
    assert peak_bytes_of(parse, body) <= max(6 * len(body), 16 * MIB)


@pytest.mark.parametrize(
    "body",
    [
        b'{"lifetime_s":1,"metadata":"' + b"A" * (2 * MIB - 100) + b'","regions":[]}',
        b'{"lifetime_s":1,"metadata":"\xf0\x9f\x98\x80' + b"A" * (2 * MIB - 100) + b'","regions":[]}',
        b'{"lifetime_s":1,"metadata":"AAAA","regions":[' + b'{"region_id":"a"},' * (CONTAINERS_MAX - 10) + b"{}]}",
        b'{"lifetime_s":1,' + b",".join(b'"f%d":1' % index for index in range(VALUES_MAX - 10)) + b"}",
    ],
    ids=["metadata", "wide metadata", "regions", "fields"],
)
@pytest.mark.parametrize("parse", [parse_registration, parse_renewal], ids=["registration", "renewal"])
def test_registrations_take_a_few_times_their_size(parse: Callable[[bytes], object], body: bytes) -> None:
    assert peak_bytes_of(parse, body) <= max(6 * len(body), 16 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("key_of", ["{:064x}", "{:0250d}", "{:x}"], ids=["digests", "long", "short"])
def test_binary_descriptors_take_a_few_times_their_size(key_of: str) -> None:
    body = encode_binary(Descriptor(tuple(key_of.format(index) for index in range(65_000)), 1, 1, 1))
    assert peak_bytes_of(decode_descriptor, body) <= max(6 * len(body), 16 * MIB)


@pytest.mark.slow
def test_a_prefix_that_is_written_once_makes_bounded_keys() -> None:
    """The keys count for the caller until its delivery ends (Call.held)."""
    prefix = "p" * KEY_PREFIX_BYTES_MAX
    body = encode_binary(Descriptor(tuple(f"{prefix}{index:064x}" for index in range(65_000)), 1, 1, 1))
    assert len(body) < 3 * MIB
    assert peak_bytes_of(decode_descriptor, body) <= 28 * MIB


@pytest.mark.parametrize("parse", [parse_lookup, parse_registration, parse_renewal])
def test_every_json_document_is_measured_before_it_is_parsed(parse: Callable[[bytes], object]) -> None:
    for body in (b'{"a":[' + b"1," * (VALUES_MAX + 1) + b"1]}", b'{"a":' * (CONTAINERS_MAX + 1)):
        with mock.patch.object(json_body, "_parsed", nothing_parses), pytest.raises(CallerError, match="values"):
            parse(body)


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


class WatchedParser:
    """expat's parser. It knows how far it came between two calls of handlers, where other threads get their turn."""

    stops: list[int]

    def __init__(self, parser: Any) -> None:
        object.__setattr__(self, "_parser", parser)
        object.__setattr__(self, "stops", [0])

    def __setattr__(self, name: str, value: Any) -> None:
        def handle(*given: Any) -> Any:
            self.stops.append(self._parser.CurrentByteIndex)
            return value(*given)

        setattr(self._parser, name, handle if name.endswith("Handler") else value)

    def Parse(self, data: bytes, is_final: bool) -> None:  # noqa: N802 - the name that expat gives it
        self._parser.Parse(data, is_final)
        self.stops.append(len(data))

    @property
    def step_bytes_max(self) -> int:
        return max(after - before for before, after in itertools.pairwise(self.stops))


OBJECT = b"<Object><Key>%s</Key></Object>"
HELD = 8 * MIB - 1000
LONG_XML = {
    "comment": b"<!--" + b"<" * HELD + b"-->",
    "comment in a section": b"<![CDATA[<!--]]><!-->" + b"<" * HELD + b"-->",
    "comments": b"<!---->" * (HELD // 7),
    "instruction": b"<?a " + b"<?" * (HELD // 2) + b"?>",
    "section": b"<![CDATA[" + b"<]" * (HELD // 2) + b"]]>",
    "sections": b"<![CDATA[]]>" * (HELD // 12),
    "attributes": b"<a " + b" ".join(b'a%d=""' % index for index in range(900_000)),
    "attribute": b'<Object a="' + b">" * HELD + b'"/>',
    "text": b"a" * HELD,
    "references": b"&amp;" * (HELD // 5),
    "wide": OBJECT % ("\U0001f600".encode() + b"a" * 60_000) * (HELD // 60_050),
    "newlines": OBJECT % (b"\n" * 60_000) * (HELD // 60_050),
    "names": b"".join(b"<%s%d/>" % (b"n" * 90, index) for index in range(79_000)),
    "elements": b"<a/>" * 79_000,
    "keys": OBJECT % b"k" * 1000,
}


@pytest.mark.slow
@pytest.mark.parametrize("content", LONG_XML.values(), ids=LONG_XML)
def test_xml_is_parsed_in_small_steps(content: bytes) -> None:
    """One step of expat holds the interpreter. 8 MiB of it stopped every other thread for a tenth of a second."""
    watched: list[WatchedParser] = []
    make = expat.ParserCreate

    def made(**options: Any) -> Any:
        watched.append(WatchedParser(make(**options)))
        return watched[-1]

    with mock.patch.object(expat, "ParserCreate", made), contextlib.suppress(CallerError):
        parse_delete(b"<Delete>" + content + b"</Delete>")
    for parser in watched:
        assert parser.step_bytes_max <= 1 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("content", LONG_XML.values(), ids=LONG_XML)
def test_xml_takes_a_few_times_its_size(content: bytes) -> None:
    """Or, of a small document, no more than its greatest number of elements."""
    body = b"<Delete>" + content + b"</Delete>"
    assert peak_bytes_of(parse_delete, body) <= max(6 * len(body), 16 * MIB)


def test_a_document_type_is_refused_before_the_document_is_parsed() -> None:
    with mock.patch.object(expat, "ParserCreate", nothing_parses), pytest.raises(CallerError, match="document type"):
        parse_delete(b'<!DOCTYPE Delete "' + b"<" * HELD + b'"><Delete/>')


@pytest.mark.slow
def test_the_longest_list_of_parts_takes_a_few_times_its_size() -> None:
    part = '<Part><PartNumber>{0}</PartNumber><ETag>"{0:032x}"</ETag><ChecksumSHA256>{1}</ChecksumSHA256></Part>'
    sha256 = base64.b64encode(bytes(32)).decode()
    parts = "".join(part.format(number, sha256) for number in range(1, 10_001))
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    assert len(parse_complete(body)) == 10_000
    assert peak_bytes_of(parse_complete, body) <= 8 * len(body)


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
    for key, nbytes in (("a", 1), ("b", 21)):
        with pytest.raises(ServerError) as refused:
            budget.take(key, nbytes)
        assert refused.value.code is ErrorCode.SLOW_DOWN
    budget.take("b", 20)
    budget.give_back("a", 60)
    budget.take("b", 40)
    budget.give_back("b", 60)
    assert budget.held_bytes == 0


def test_no_few_keys_take_all_of_a_budget() -> None:
    """Two keys of half each kept everybody else out."""
    budget = DocumentBudget(total_bytes=1024, key_bytes=512)
    for key in "abcdef":
        left_bytes = 1024 - budget.held_bytes
        budget.take(key, left_bytes // 2)
        with pytest.raises(ServerError):
            budget.take(key, left_bytes // 2 + 1)
    budget.take("another", 8)
