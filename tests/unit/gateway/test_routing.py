"""Which operation a request is: a total table, and nothing guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode
from gateway.handlers import HANDLERS
from gateway.s3.request import S3Request
from gateway.s3.routing import SUBRESOURCES, Operation, route

COPY = {"x-amz-copy-source": "b/k"}


def request(method: str, target: str, headers: dict[str, str] | None = None) -> S3Request:
    path, _, query = target.partition("?")
    pairs = [part.partition("=") for part in query.split("&")] if query else []
    return S3Request(method, path, tuple((name, value) for name, _, value in pairs), headers or {})


@pytest.mark.parametrize(
    ("method", "target", "headers", "operation"),
    [
        ("GET", "/", {}, Operation.LIST_BUCKETS),
        ("GET", "/?x-id=ListBuckets", {}, Operation.LIST_BUCKETS),
        ("PUT", "/b", {}, Operation.CREATE_BUCKET),
        ("PUT", "/b/", {}, Operation.CREATE_BUCKET),
        ("DELETE", "/b", {}, Operation.DELETE_BUCKET),
        ("GET", "/b", {}, Operation.LIST_OBJECTS),
        ("GET", "/b?list-type=2&prefix=acl", {}, Operation.LIST_OBJECTS_V2),
        ("GET", "/b?versions&prefix=", {}, Operation.LIST_OBJECT_VERSIONS),
        ("GET", "/b?uploads", {}, Operation.LIST_UPLOADS),
        ("POST", "/b", {}, Operation.POST_OBJECT),
        ("POST", "/b?delete", {}, Operation.DELETE_OBJECTS),
        ("DELETE", "/b?lifecycle", {}, Operation.DELETE_LIFECYCLE),
        ("PUT", "/b/k", {}, Operation.PUT_OBJECT),
        ("PUT", "/b//", {}, Operation.PUT_OBJECT),
        ("PUT", "/b/k", COPY, Operation.COPY_OBJECT),
        ("PUT", "/b/k?partNumber=1&uploadId=u", {}, Operation.UPLOAD_PART),
        ("PUT", "/b/k?partNumber=1&uploadId=u", COPY, Operation.COPY_PART),
        ("PUT", "/b/k?tagging&versionId=null", {}, Operation.PUT_OBJECT_TAGGING),
        ("GET", "/b/k?partNumber=1&versionId=null", {}, Operation.GET_OBJECT),
        ("GET", "/b/k?uploadId=u", {}, Operation.LIST_PARTS),
        ("HEAD", "/b/k?partNumber=1", {}, Operation.HEAD_OBJECT),
        ("POST", "/b/k?uploads", {}, Operation.CREATE_UPLOAD),
        ("POST", "/b/k?uploadId=u", {}, Operation.COMPLETE_UPLOAD),
        ("DELETE", "/b/k?uploadId=u", {}, Operation.ABORT_UPLOAD),
        ("GET", "/b/k?attributes", {}, Operation.GET_OBJECT_ATTRIBUTES),
    ],
)
def test_requests_are_what_s3_says(method: str, target: str, headers: dict[str, str], operation: Operation) -> None:
    assert route(request(method, target, headers)) is operation


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("GET", "/b?analytics", ErrorCode.NOT_IMPLEMENTED),
        ("HEAD", "/b?acl", ErrorCode.NOT_IMPLEMENTED),
        ("PUT", "/b?versioning", ErrorCode.NOT_IMPLEMENTED),
        ("POST", "/b/k?restore", ErrorCode.NOT_IMPLEMENTED),
        ("PUT", "/b/k?uploads", ErrorCode.NOT_IMPLEMENTED),
        ("DELETE", "/b/k?acl", ErrorCode.NOT_IMPLEMENTED),
        ("GET", "/b/k?acl&tagging", ErrorCode.INVALID_ARGUMENT),
        ("PUT", "/b/k?partNumber=1", ErrorCode.INVALID_ARGUMENT),
        ("PUT", "/b/k?uploadId=u", ErrorCode.INVALID_ARGUMENT),
        ("PUT", "/b/k?versionId=null", ErrorCode.INVALID_ARGUMENT),
        ("GET", "/b?list-type=3", ErrorCode.INVALID_ARGUMENT),
        ("GET", "//k", ErrorCode.INVALID_URI),
        ("PATCH", "/b/k", ErrorCode.METHOD_NOT_ALLOWED),
    ],
)
def test_the_rest_is_refused_by_name(method: str, target: str, code: ErrorCode) -> None:
    with pytest.raises(CallerError) as error:
        route(request(method, target))
    assert error.value.code is code


def test_every_operation_has_a_handler_and_an_action() -> None:
    """Metrics and the status are answered by the gateway itself: a token may stand in for the access key."""
    assert set(HANDLERS) == set(Operation) - {Operation.METRICS, Operation.STATUS}
    assert {Operation.COPY_OBJECT.action, Operation.COMPLETE_UPLOAD.action} == {"PutObject"}
    assert {Operation.HEAD_OBJECT.action, Operation.LAYERWISE.action} == {"GetObject"}


@given(
    st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE"]),
    st.sampled_from(["/", "/b", "/b/k"]),
    st.sets(st.sampled_from([*sorted(SUBRESOURCES), "partNumber", "versionId", "list-type", "prefix"]), max_size=3),
)
def test_a_subresource_is_never_taken_for_the_thing_itself(method: str, path: str, names: set[str]) -> None:
    """DELETE /bucket?website must not delete the bucket."""
    plain = {
        Operation.LIST_BUCKETS,
        Operation.CREATE_BUCKET,
        Operation.HEAD_BUCKET,
        Operation.DELETE_BUCKET,
        Operation.LIST_OBJECTS,
        Operation.LIST_OBJECTS_V2,
        Operation.PUT_OBJECT,
        Operation.GET_OBJECT,
        Operation.HEAD_OBJECT,
        Operation.DELETE_OBJECT,
        Operation.POST_OBJECT,
    }
    try:
        operation = route(S3Request(method, path, tuple((name, "2") for name in sorted(names)), {}))
    except CallerError:
        return
    assert (operation in plain) == (not names & SUBRESOURCES)
