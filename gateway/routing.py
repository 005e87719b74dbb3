"""Which operation a request asks for: one total table. What S3 has and we lack is NotImplemented, never guessed."""

from __future__ import annotations

from enum import Enum

from descriptors.errors import CallerError, ErrorCode
from gateway.request import SERVICE_PREFIX, S3Request

DESCRIPTOR_HEADER = "x-amz-objectcache-descriptor"


class Operation(Enum):
    """What a request asks for; the value is the action an access key must be allowed."""

    LIST_BUCKETS = "ListAllMyBuckets"
    CREATE_BUCKET = "CreateBucket"
    HEAD_BUCKET = "ListBucket:head"
    LIST_OBJECTS_V2 = "ListBucket"
    PUT_OBJECT = "PutObject"
    GET_OBJECT = "GetObject"
    HEAD_OBJECT = "GetObject:head"
    DELETE_OBJECT = "DeleteObject"
    LAYERWISE = "GetObject:layerwise"
    LAYERWISE_HEADER = "GetObject:layerwise-header"
    LOOKUP = "GetObject:lookup"
    REGISTER_AGENT = "RegisterAgent"
    RENEW_AGENT = "RegisterAgent:renew"
    DELETE_AGENT = "RegisterAgent:delete"
    CANCEL_REQUEST = "RegisterAgent:cancel"

    @property
    def action(self) -> str:
        """The S3 action this operation needs."""
        return self.value.partition(":")[0]


IGNORED_PARAMETERS = frozenset({"x-id"})
SUBRESOURCES = frozenset(
    {
        "accelerate", "acl", "analytics", "attributes", "cors", "delete", "encryption", "intelligent-tiering",
        "inventory", "legal-hold", "lifecycle", "location", "logging", "metrics", "notification", "object-lock",
        "ownershipControls", "partNumber", "policy", "policyStatus", "publicAccessBlock", "replication",
        "requestPayment", "restore", "retention", "select", "tagging", "torrent", "uploadId", "uploads",
        "versionId", "versioning", "versions", "website",
    }
)  # fmt: skip

_SERVICE = {"GET": Operation.LIST_BUCKETS}
_BUCKET = {"PUT": Operation.CREATE_BUCKET, "HEAD": Operation.HEAD_BUCKET, "GET": Operation.LIST_OBJECTS_V2}
_OBJECT = {
    "PUT": Operation.PUT_OBJECT,
    "GET": Operation.GET_OBJECT,
    "HEAD": Operation.HEAD_OBJECT,
    "DELETE": Operation.DELETE_OBJECT,
}
_AGENT = {"POST": Operation.RENEW_AGENT, "DELETE": Operation.DELETE_AGENT}
_S3_METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})


def route(request: S3Request) -> Operation:
    """Raises CallerError: NotImplemented for S3 operations we lack, MethodNotAllowed for the rest."""
    if request.bucket == SERVICE_PREFIX:
        return _route_service(request)
    names = {name for name, _ in request.query if name not in IGNORED_PARAMETERS}
    if "layerwise" in names or "lookup" in names:
        return _route_layerwise(request, names)
    subresource = next(iter(sorted(names & SUBRESOURCES)), None)
    if subresource is not None:
        raise CallerError(
            ErrorCode.NOT_IMPLEMENTED, f"{request.method} with ?{subresource} is not implemented", field=subresource
        )
    if not request.bucket:
        if request.key:
            raise CallerError(ErrorCode.INVALID_URI, "the path has a key but no bucket", field="uri")
        return _pick(_SERVICE, request)
    if not request.key:
        if request.method == "GET" and request.parameters.get("list-type") != "2":
            raise CallerError(
                ErrorCode.NOT_IMPLEMENTED, "only ListObjectsV2 (list-type=2) is implemented", field="list-type"
            )
        return _pick(_BUCKET, request)
    if request.method == "PUT" and "x-amz-copy-source" in request.headers:
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, "CopyObject is not implemented", field="x-amz-copy-source")
    if request.method == "GET" and DESCRIPTOR_HEADER in request.headers:
        return Operation.LAYERWISE_HEADER
    return _pick(_OBJECT, request)


def _route_layerwise(request: S3Request, names: set[str]) -> Operation:
    if request.method != "POST" or not request.bucket or request.key:
        raise CallerError(ErrorCode.METHOD_NOT_ALLOWED, "?layerwise and ?lookup are POST requests to a bucket")
    if {"layerwise", "lookup"} <= names:
        raise CallerError(ErrorCode.INVALID_REQUEST, "?layerwise and ?lookup exclude each other", field="lookup")
    return Operation.LAYERWISE if "layerwise" in names else Operation.LOOKUP


def _route_service(request: S3Request) -> Operation:
    kind, _, name = request.key.partition("/")
    if kind == "agents" and not name:
        return _pick({"POST": Operation.REGISTER_AGENT}, request)
    if kind == "agents" and "/" not in name:
        return _pick(_AGENT, request)
    if kind == "requests" and name and "/" not in name:
        return _pick({"DELETE": Operation.CANCEL_REQUEST}, request)
    raise CallerError(ErrorCode.INVALID_URI, f"there is nothing at {request.path}", field="uri")


def _pick(table: dict[str, Operation], request: S3Request) -> Operation:
    operation = table.get(request.method)
    if operation is not None:
        return operation
    if request.method in _S3_METHODS and request.bucket != SERVICE_PREFIX:
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, f"{request.method} is not implemented here", field="method")
    raise CallerError(ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not allowed here", field="method")
