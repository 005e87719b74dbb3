"""XML documents of an S3 service, written and read by botocore's own serializer and parser. Pure.

The trees that botocore reads come from `descriptors.xml_body`, which bounds them: the service may be anybody's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar
from urllib.parse import quote, urlencode
from xml.etree.ElementTree import Element

from botocore.parsers import ResponseParserError, RestXMLParser
from botocore.serialize import create_serializer
from botocore.session import Session
from botocore.utils import parse_timestamp

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.objects import TIME_S_MAX
from descriptors.xml_body import element_of
from storage_server.home.rules.refusals import refusal

HERE_BYTES_MAX = 2 << 10
"""A document up to this size, a dozen entries, is read and written in a millisecond."""
HERE_ENTRIES_MAX = 16
ELEMENTS_MAX = 40_000
"""An answer has no more elements: 1,000 entries of a list have 14 each, and 10,000 buckets 3. Collecting garbage stops
every thread, for half a microsecond an element.
"""
SIZE_MAX = 1 << 50
"""S3's own largest object has 50 TB."""
ENTRIES_MAX = 1_000
"""One list in a document has no more entries; pages of S3's lists have no more."""
TIME_CHARACTERS_MAX = 64
_FIRST, _LAST = datetime.fromtimestamp(0, UTC), datetime.fromtimestamp(TIME_S_MAX, UTC)
"""Services write the year 1 for an unknown time, and the last year with any offset: no answer of ours could have it."""
_ROOTS: Mapping[str, str] = {
    "CompleteMultipartUpload": "CompleteMultipartUploadResult",
    "CopyObject": "CopyObjectResult",
    "CreateMultipartUpload": "InitiateMultipartUploadResult",
    "DeleteObjects": "DeleteResult",
    "GetBucketLifecycleConfiguration": "LifecycleConfiguration",
    "GetObjectAttributes": "GetObjectAttributesResponse",
    "GetObjectTagging": "Tagging",
    "ListBuckets": "ListAllMyBucketsResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "ListObjectsV2": "ListBucketResult",
    "ListParts": "ListPartsResult",
    "UploadPartCopy": "CopyPartResult",
}
"""The root of the document with which each operation is answered. Other operations that we use are answered by a status
and headers.
"""
_ROOT_ENDINGS = ("Output", "Response", "Result")
"""Services that are generated from a model name a root by the operation and one of these."""
_ERROR, _GOOD = "Error", 200
_T = TypeVar("_T")
_UNWRITABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """One request as it goes over the wire: `target` is path and query, percent-encoded; header names as they come."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


def prepare() -> None:
    """Read the model of the S3 API, which takes a tenth of a second, ahead of the first document."""
    call_of("HeadBucket", {"Bucket": "bucket"})
    result_of("HeadBucket", 200, {}, b"", dict)


def has_many_entries(parameters: Mapping[str, Any]) -> bool:
    """Whether writing the document of these parameters takes long: it has more than HERE_ENTRIES_MAX entries."""
    documents = (document.values() for document in parameters.values() if isinstance(document, dict))
    return any(isinstance(each, list) and len(each) > HERE_ENTRIES_MAX for entries in documents for each in entries)


def call_of(operation: str, parameters: Mapping[str, Any]) -> ServiceCall:
    """The request of an operation of the S3 API, by the names of its model. Raises CallerError(InvalidArgument) for
    text that no XML document can have.
    """
    made = _serializer().serialize_to_request(dict(parameters), _model().operation_model(operation))
    query = urlencode({name: _text(value) for name, value in made["query_string"].items()}, quote_via=quote)
    joint = "&" if "?" in made["url_path"] else "?"
    return ServiceCall(
        made["method"], made["url_path"] + (joint + query if query else ""), made["headers"], _written(made["body"])
    )


def is_writable(text: str) -> bool:
    """Whether an XML document can have this text (XML 1.0, section 2.2)."""
    return _UNWRITABLE.search(text) is None


def _written(body: bytes) -> bytes:
    """A document as every parser reads it: a bare CR would become LF (XML 1.0, section 2.11), and name another key."""
    if not body:
        return body
    if not is_writable(body.decode()):
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "a character that no XML document can have", field="key")
    return body.replace(b"\r", b"&#13;")


def result_of(
    operation: str, status: int, headers: Mapping[str, str], body: bytes, read: Callable[[dict[str, Any]], _T]
) -> _T:
    """The result of `read` for the answer to an operation, by the names of its model. S3 may answer 200 before a copy
    or a completion has succeeded, and send its refusal as the document. Raises that refusal, and
    ServerError(InternalError) for any other document than that of the operation, also for an empty one, for one that
    is too large, and where `read` fails for it.
    """
    if operation not in _ROOTS:
        _refuse_error(body)
        body = b""
    answer = {
        "status_code": status,
        "headers": _Headers(headers),
        "body": body,
        "context": {"operation_name": operation},
    }
    shape = _model().operation_model(operation).output_shape
    try:
        return read(_parser(operation).parse(answer, shape))
    except ObjectCacheError:
        raise
    except Exception as error:  # botocore's parser raises errors of many kinds, also RuntimeError
        problem = f"the upstream store's answer to {operation} is no such document"
        raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True) from error


def entries_of(found: Mapping[str, Any], name: str, entries_max: int = ENTRIES_MAX) -> list[Any]:
    """The entries of a list in a document. Raises ServerError(InternalError) for more than any service should send."""
    entries: list[Any] = found.get(name, [])
    if len(entries) > entries_max:
        problem = f"the upstream store's answer has {len(entries)} {name}, of {entries_max} at most"
        raise ServerError(ErrorCode.INTERNAL_ERROR, problem, retryable=True)
    return entries


def size_of(entry: Mapping[str, Any]) -> int:
    """The size in an entry of a list. Raises ValueError for one that no object has."""
    nbytes: int = entry["Size"]
    if not 0 <= nbytes <= SIZE_MAX:
        raise ValueError(f"an object of {nbytes} bytes")
    return nbytes


class _Headers(dict[str, str]):
    """Headers with lower-case names that are found whatever the case of the name asked for, as the parser asks."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _model() -> Any:
    return Session().get_service_model("s3")


@cache
def _serializer() -> Any:
    return create_serializer("rest-xml", include_validation=False)


def _refuse_error(body: bytes) -> None:
    """Raises the refusal in an answer of a good status whose body should be empty."""
    if not body.strip():
        return
    try:
        root = element_of(body, ELEMENTS_MAX)
    except ValueError:
        return
    if root.tag == _ERROR:
        raise refusal(_GOOD, body)


class _Parser(RestXMLParser):  # type: ignore[misc]
    """Botocore's parser for the answers to one operation. It takes the elements that it reads from our bounded trees,
    and looks at the root, which botocore's does not.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(timestamp_parser=_time)
        self._roots = {_ROOTS.get(operation, ""), *(operation + ending for ending in _ROOT_ENDINGS)}

    def _initial_body_parse(self, xml_string: bytes) -> Element:
        if not xml_string and "" in self._roots:
            return Element("")
        try:
            root = element_of(xml_string, ELEMENTS_MAX)
        except ValueError as error:
            raise ResponseParserError(str(error)) from error
        if root.tag == _ERROR:
            raise refusal(_GOOD, xml_string)
        if root.tag not in self._roots:
            raise ResponseParserError(f"the document is a {root.tag}")
        return root


def _time(value: Any) -> datetime:
    """The time in a document. Botocore's own parser takes ten times as long for the way in which S3 writes it."""
    text = str(value)
    if len(text) > TIME_CHARACTERS_MAX:
        raise ValueError("a time of so many characters")
    return min(max(_parsed_time(text), _FIRST), _LAST)


def _parsed_time(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
        if when.tzinfo is not None:
            return when
    except ValueError:
        pass
    found: datetime = parse_timestamp(text)
    return found


@cache
def _parser(operation: str) -> Any:
    return _Parser(operation)
