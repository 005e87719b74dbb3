"""The targets of fuzzing. Each target reads bytes as a stranger may send them. A CallerError is an answer, anything
else a bug.

Where input may come in pieces, a target also checks that the pieces make no difference.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator

from descriptors.descriptor_codec import decode_descriptor
from descriptors.errors import CallerError
from descriptors.rdma_token import encode_token, parse_token
from gateway.s3 import sigv2
from gateway.s3.addressing import bucket_from_host
from gateway.s3.aws_chunked import ChunkedDecoder, SignatureChain
from gateway.s3.conditions import delete_condition, read_condition, write_condition
from gateway.s3.copy_headers import directive, parse_copy_range, parse_copy_source
from gateway.s3.form import FileReader, HeadReader, boundary_of
from gateway.s3.object_headers import new_attributes, new_checksum, overriding_headers, refuse_unsupported
from gateway.s3.parameters import after_token, check_version, part_number
from gateway.s3.payload_form import PayloadForm
from gateway.s3.post_policy import parse_policy
from gateway.s3.request import S3Request, check_bucket_name, check_key, parse_range, parse_target, without_chunk_coding
from gateway.s3.routing import route
from gateway.s3.sigv4 import read_claim, read_form_claim, verify
from gateway.s3.tags import parse_tagging_header
from gateway.s3.upload import plan_body, plan_document
from gateway.s3.xml_in import parse_acl, parse_complete, parse_create_bucket, parse_delete, parse_tagging
from gateway.s3.xml_lifecycle import parse_lifecycle

DOMAINS = ("s3.example.com",)
TRAILER = "x-amz-checksum-crc32"
_FORMS = list(PayloadForm)


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """A caller's error is a fine end."""
    try:
        yield
    except CallerError:
        return


def fuzz_request(data: bytes) -> None:
    """A request line and headers, as lines: parsed, authenticated and routed."""
    with answered():
        request = _request(data)
        with answered():
            route(request)
        claim = read_claim(request)
        verify(request, claim, "secret", "us-east-1", 1_369_353_600.0)


def fuzz_headers(data: bytes) -> None:
    """Everything headers and parameters can say of an object, a body or a condition."""
    with answered():
        request = _request(data)
        headers = without_chunk_coding(request.headers)
        for read in (
            lambda: new_attributes(headers),
            lambda: overriding_headers(request.parameters),
            lambda: refuse_unsupported(headers),
            lambda: read_condition(headers),
            lambda: write_condition(headers),
            lambda: delete_condition(headers),
            lambda: parse_copy_source({"x-amz-copy-source": "", **headers}),
            lambda: parse_copy_range(headers),
            lambda: new_checksum(headers),
            lambda: directive(headers, "x-amz-metadata-directive"),
            lambda: part_number(request.parameters),
            lambda: after_token(request.parameters.get("continuation-token", "")),
            lambda: check_version(request),
            lambda: parse_tagging_header(headers.get("x-amz-tagging")),
            lambda: check_key(request.key),
            lambda: check_bucket_name(request.bucket),
        ):
            with answered():
                read()
        for form in PayloadForm:
            with answered():
                plan_body(request, form, None)
            with answered():
                plan_document(request, form, None)


def fuzz_range(data: bytes) -> None:
    """A Range header."""
    spec = parse_range(data.decode("utf-8", "surrogateescape"))
    assert spec is None or spec.suffix is not None or spec.first is not None


def fuzz_host(data: bytes) -> None:
    """A Host header."""
    with answered():
        bucket = bucket_from_host(data.decode("utf-8", "surrogateescape"), DOMAINS)
        assert bucket is None or bucket


def fuzz_chunks(data: bytes) -> None:
    """An aws-chunked body; the first three bytes choose length, form and step. Whole and in steps it is the same."""
    if len(data) < 3:
        return
    nbytes, form, step = data[0], _FORMS[data[1] % len(_FORMS)], data[2] % 16 + 1
    assert decode_in_steps(data[3:], nbytes, form, len(data)) == decode_in_steps(data[3:], nbytes, form, step)


def decode_in_steps(wire: bytes, nbytes: int, form: PayloadForm, step: int) -> tuple[bytes, dict[str, str] | str]:
    """The decoded bytes, and the trailers or the error at their end."""
    chain = SignatureChain(b"key", "20130524T000000Z", "scope", "0" * 64) if form.is_signed else None
    decoder = ChunkedDecoder(nbytes, chain, frozenset({TRAILER}) if form.has_trailer else None)
    decoded = bytearray()
    try:
        for at in range(0, len(wire), step):
            for piece in decoder.feed(wire[at : at + step]):
                decoded += piece
        assert len(decoded) <= nbytes
        trailers = decoder.finish()
        assert len(decoded) == nbytes
        return bytes(decoded), trailers
    except CallerError as error:
        return bytes(decoded), str(error)


def read_form(content_type: str, body: bytes, step: int) -> tuple[dict[str, str], int, bytes, bool]:
    """The fields of a form, the bytes of its head, the file, and whether that has ended; or the error in the fields."""
    boundary = boundary_of(content_type)
    head_reader, file_reader = HeadReader(boundary), FileReader(boundary)
    head, found = None, bytearray()
    try:
        for at in range(0, len(body), max(1, step)):
            data = body[at : at + max(1, step)]
            if head is None:
                head = head_reader.add(data)
                data = head_reader.rest
            if head is not None:
                found += file_reader.feed(data)
    except CallerError as error:
        return {"error": error.code.value}, 0, b"", False
    if head is None:
        return {}, 0, b"", False
    return head.fields, head.nbytes, bytes(found), file_reader.has_ended


def fuzz_form(data: bytes) -> None:
    """An HTML form behind the line of its content type. Whole and in steps it is the same; its claim is read."""
    content_type, _, body = data.partition(b"\n")
    kind = content_type.decode("utf-8", "surrogateescape")
    with answered():
        found = read_form(kind, body, len(body))
        assert found == read_form(kind, body, 7)
        for read in (sigv2.read_form_claim, read_form_claim):
            with answered():
                read({"awsaccesskeyid": "", **found[0]})


def fuzz_policy(data: bytes) -> None:
    """The policy of a form, as JSON and as the field's text."""
    for text in (data.decode("utf-8", "surrogateescape"), base64.b64encode(data).decode()):
        with answered():
            policy = parse_policy(text)
            policy.check_bytes(5)
            policy.check({"key": "k", "bucket": "b"}, 0.0)


def fuzz_descriptor(data: bytes) -> None:
    """A descriptor, in either of its codings."""
    with answered():
        decode_descriptor(data)


def fuzz_token(data: bytes) -> None:
    """An RDMA token as its header's value, and as what the value encodes; what is read is written the same."""
    wrapped = "objectcache-1." + base64.urlsafe_b64encode(data).decode().rstrip("=")
    for text in (data.decode("utf-8", "surrogateescape"), wrapped):
        with answered():
            token = parse_token(text)
            assert token is None or parse_token(encode_token(token)) == token


def _xml(parse: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def fuzz_xml(data: bytes) -> None:
        with answered():
            parse(data)

    return fuzz_xml


TARGETS: dict[str, Callable[[bytes], None]] = {
    "request": fuzz_request,
    "headers": fuzz_headers,
    "range": fuzz_range,
    "host": fuzz_host,
    "chunks": fuzz_chunks,
    "form": fuzz_form,
    "policy": fuzz_policy,
    "descriptor": fuzz_descriptor,
    "token": fuzz_token,
    "xml_delete": _xml(parse_delete),
    "xml_complete": _xml(parse_complete),
    "xml_tagging": _xml(parse_tagging),
    "xml_lifecycle": _xml(parse_lifecycle),
    "xml_create_bucket": _xml(parse_create_bucket),
    "xml_acl": _xml(lambda body: parse_acl(body, "owner")),
}


def _request(data: bytes) -> S3Request:
    line, *fields = data.decode("utf-8", "surrogateescape").split("\n")
    method, _, target = line.partition(" ")
    headers = {name.lower(): value for name, _, value in (field.partition(":") for field in fields)}
    return parse_target(method, target, headers, DOMAINS)
