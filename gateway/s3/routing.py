"""The operation that a request asks for, as one total table. A request of S3 that this server lacks is
NotImplemented.
"""

from __future__ import annotations

from enum import Enum

from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import DESCRIPTOR_HEADER, SERVICE_PREFIX
from gateway.s3.request import S3Request

COPY_SOURCE_HEADER = "x-amz-copy-source"


class Operation(Enum):
    """An operation. The value is the action that the access key must be allowed."""

    LIST_BUCKETS = "ListAllMyBuckets"
    CREATE_BUCKET = "CreateBucket"
    HEAD_BUCKET = "ListBucket:head"
    DELETE_BUCKET = "DeleteBucket"
    GET_BUCKET_LOCATION = "GetBucketLocation"
    GET_BUCKET_VERSIONING = "GetBucketVersioning"
    GET_BUCKET_ACL = "GetBucketAcl"
    PUT_BUCKET_ACL = "PutBucketAcl"
    GET_LIFECYCLE = "GetLifecycleConfiguration"
    PUT_LIFECYCLE = "PutLifecycleConfiguration"
    DELETE_LIFECYCLE = "PutLifecycleConfiguration:delete"
    GET_BUCKET_POLICY = "GetBucketPolicy"
    GET_BUCKET_CORS = "GetBucketCORS"
    GET_BUCKET_ENCRYPTION = "GetEncryptionConfiguration"
    GET_BUCKET_TAGGING = "GetBucketTagging"
    GET_BUCKET_WEBSITE = "GetBucketWebsite"
    GET_PUBLIC_ACCESS_BLOCK = "GetBucketPublicAccessBlock"
    GET_OWNERSHIP_CONTROLS = "GetBucketOwnershipControls"
    GET_REPLICATION = "GetReplicationConfiguration"
    GET_OBJECT_LOCK = "GetBucketObjectLockConfiguration"
    LIST_OBJECTS = "ListBucket:v1"
    LIST_OBJECTS_V2 = "ListBucket"
    LIST_OBJECT_VERSIONS = "ListBucketVersions"
    LIST_UPLOADS = "ListBucketMultipartUploads"
    DELETE_OBJECTS = "DeleteObject:many"
    PUT_OBJECT = "PutObject"
    POST_OBJECT = "PutObject:form"
    COPY_OBJECT = "PutObject:copy"
    GET_OBJECT = "GetObject"
    HEAD_OBJECT = "GetObject:head"
    DELETE_OBJECT = "DeleteObject"
    GET_OBJECT_ATTRIBUTES = "GetObjectAttributes"
    GET_OBJECT_ACL = "GetObjectAcl"
    PUT_OBJECT_ACL = "PutObjectAcl"
    GET_OBJECT_TAGGING = "GetObjectTagging"
    PUT_OBJECT_TAGGING = "PutObjectTagging"
    DELETE_OBJECT_TAGGING = "DeleteObjectTagging"
    CREATE_UPLOAD = "PutObject:create-upload"
    UPLOAD_PART = "PutObject:part"
    COPY_PART = "PutObject:part-copy"
    COMPLETE_UPLOAD = "PutObject:complete-upload"
    ABORT_UPLOAD = "AbortMultipartUpload"
    LIST_PARTS = "ListMultipartUploadParts"
    LAYERWISE = "GetObject:layerwise"
    LAYERWISE_HEADER = "GetObject:layerwise-header"
    LOOKUP = "GetObject:lookup"
    PUT_CHUNKS = "PutObject:chunks"
    TRANSPORTS = "RegisterAgent:transports"
    SCHEDULER = "RegisterAgent:scheduler"
    METRICS = "GetMetrics"
    STATUS = "GetMetrics:status"
    REGISTER_AGENT = "RegisterAgent"
    RENEW_AGENT = "RegisterAgent:renew"
    DELETE_AGENT = "RegisterAgent:delete"
    CANCEL_REQUEST = "RegisterAgent:cancel"

    @property
    def action(self) -> str:
        """The S3 action that this operation needs."""
        return self.value.partition(":")[0]


SUBRESOURCES = frozenset(
    {
        "abac", "accelerate", "acl", "analytics", "attributes", "cors", "delete", "encryption", "intelligent-tiering",
        "inventory", "legal-hold", "lifecycle", "location", "logging", "metadataConfiguration", "metadataTable",
        "metrics", "notification", "object-lock", "ownershipControls", "policy", "policyStatus", "publicAccessBlock",
        "renameObject", "replication", "requestPayment", "restore", "retention", "select", "session", "tagging",
        "torrent", "uploadId", "uploads", "versioning", "versions", "website",
    }
)  # fmt: skip
"""Query parameters that select the operation. `partNumber` and `versionId` are not among them: they
only select bytes.
"""

_Table = dict[tuple[str, str], Operation]
"""Maps (method, subresource or "") to the operation."""

_SERVICE: _Table = {("GET", ""): Operation.LIST_BUCKETS}
_BUCKET: _Table = {
    ("PUT", ""): Operation.CREATE_BUCKET,
    ("HEAD", ""): Operation.HEAD_BUCKET,
    ("DELETE", ""): Operation.DELETE_BUCKET,
    ("GET", ""): Operation.LIST_OBJECTS,
    ("GET", "location"): Operation.GET_BUCKET_LOCATION,
    ("GET", "versioning"): Operation.GET_BUCKET_VERSIONING,
    ("GET", "versions"): Operation.LIST_OBJECT_VERSIONS,
    ("GET", "uploads"): Operation.LIST_UPLOADS,
    ("GET", "acl"): Operation.GET_BUCKET_ACL,
    ("PUT", "acl"): Operation.PUT_BUCKET_ACL,
    ("GET", "lifecycle"): Operation.GET_LIFECYCLE,
    ("PUT", "lifecycle"): Operation.PUT_LIFECYCLE,
    ("DELETE", "lifecycle"): Operation.DELETE_LIFECYCLE,
    ("GET", "policy"): Operation.GET_BUCKET_POLICY,
    ("GET", "cors"): Operation.GET_BUCKET_CORS,
    ("GET", "encryption"): Operation.GET_BUCKET_ENCRYPTION,
    ("GET", "tagging"): Operation.GET_BUCKET_TAGGING,
    ("GET", "website"): Operation.GET_BUCKET_WEBSITE,
    ("GET", "publicAccessBlock"): Operation.GET_PUBLIC_ACCESS_BLOCK,
    ("GET", "ownershipControls"): Operation.GET_OWNERSHIP_CONTROLS,
    ("GET", "replication"): Operation.GET_REPLICATION,
    ("GET", "object-lock"): Operation.GET_OBJECT_LOCK,
    ("POST", ""): Operation.POST_OBJECT,
    ("POST", "delete"): Operation.DELETE_OBJECTS,
}
_OBJECT: _Table = {
    ("PUT", ""): Operation.PUT_OBJECT,
    ("GET", ""): Operation.GET_OBJECT,
    ("HEAD", ""): Operation.HEAD_OBJECT,
    ("DELETE", ""): Operation.DELETE_OBJECT,
    ("GET", "attributes"): Operation.GET_OBJECT_ATTRIBUTES,
    ("GET", "acl"): Operation.GET_OBJECT_ACL,
    ("PUT", "acl"): Operation.PUT_OBJECT_ACL,
    ("GET", "tagging"): Operation.GET_OBJECT_TAGGING,
    ("PUT", "tagging"): Operation.PUT_OBJECT_TAGGING,
    ("DELETE", "tagging"): Operation.DELETE_OBJECT_TAGGING,
    ("POST", "uploads"): Operation.CREATE_UPLOAD,
    ("PUT", "uploadId"): Operation.UPLOAD_PART,
    ("POST", "uploadId"): Operation.COMPLETE_UPLOAD,
    ("DELETE", "uploadId"): Operation.ABORT_UPLOAD,
    ("GET", "uploadId"): Operation.LIST_PARTS,
}
_OF_COPIES = {Operation.PUT_OBJECT: Operation.COPY_OBJECT, Operation.UPLOAD_PART: Operation.COPY_PART}
_NO_VERSION = frozenset(
    {Operation.PUT_OBJECT, Operation.COPY_OBJECT, Operation.UPLOAD_PART, Operation.COPY_PART, Operation.CREATE_UPLOAD}
)
_AGENT: _Table = {("POST", ""): Operation.RENEW_AGENT, ("DELETE", ""): Operation.DELETE_AGENT}
_S3_METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})


def is_list_buckets(request: S3Request) -> bool:
    """Whether `route` will return ListBuckets."""
    names = {name for name, _ in request.query}
    return request.method == "GET" and not request.bucket and not request.key and not names & SUBRESOURCES


def route(request: S3Request) -> Operation:
    """The operation of a request. Raises CallerError: NotImplemented for S3 operations that this server lacks,
    MethodNotAllowed for the rest, InvalidArgument for parameters that contradict each other.
    """
    if request.bucket == SERVICE_PREFIX:
        return _route_service(request)
    names = {name for name, _ in request.query}
    if "layerwise" in names or "lookup" in names:
        return _route_layerwise(request, names)
    if not request.bucket:
        if request.key:
            raise CallerError(ErrorCode.INVALID_URI, "the path has a key but no bucket", field="uri")
        return _pick(_SERVICE, request, names)
    if not request.key:
        return _route_bucket(request, names)
    return _route_object(request, names)


def _route_bucket(request: S3Request, names: set[str]) -> Operation:
    operation = _pick(_BUCKET, request, names)
    if operation is not Operation.LIST_OBJECTS or "list-type" not in names:
        return operation
    if request.parameters["list-type"] != "2":
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "list-type can only be 2", field="list-type")
    return Operation.LIST_OBJECTS_V2


def _route_object(request: S3Request, names: set[str]) -> Operation:
    operation = _pick(_OBJECT, request, names)
    if operation is Operation.GET_OBJECT and DESCRIPTOR_HEADER in request.headers:
        return Operation.LAYERWISE_HEADER
    if COPY_SOURCE_HEADER in request.headers:
        operation = _OF_COPIES.get(operation, operation)
    if "versionId" in names and operation in _NO_VERSION:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "this request takes no version id", field="versionId")
    wants_part = operation in (Operation.UPLOAD_PART, Operation.COPY_PART)
    if request.method == "PUT" and wants_part != ("partNumber" in names):
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "partNumber and uploadId go together", field="partNumber")
    return operation


def _route_layerwise(request: S3Request, names: set[str]) -> Operation:
    is_put = request.method == "PUT" and "layerwise" in names
    if (request.method != "POST" and not is_put) or not request.bucket or request.key:
        raise CallerError(ErrorCode.METHOD_NOT_ALLOWED, "POST goes with ?layerwise and ?lookup, PUT with ?layerwise")
    if {"layerwise", "lookup"} <= names:
        raise CallerError(ErrorCode.INVALID_REQUEST, "?layerwise and ?lookup exclude each other", field="lookup")
    if is_put:
        return Operation.PUT_CHUNKS
    return Operation.LAYERWISE if "layerwise" in names else Operation.LOOKUP


def _route_service(request: S3Request) -> Operation:
    kind, _, name = request.key.partition("/")
    if request.key == "transports":
        return _pick({("GET", ""): Operation.TRANSPORTS}, request, set())
    if request.key == "scheduler":
        return _pick({("GET", ""): Operation.SCHEDULER}, request, set())
    if request.key == "metrics":
        return _pick({("GET", ""): Operation.METRICS}, request, set())
    if request.key == "status":
        return _pick({("GET", ""): Operation.STATUS}, request, set())
    if kind == "agents" and not name:
        return _pick({("POST", ""): Operation.REGISTER_AGENT}, request, set())
    if kind == "agents" and "/" not in name:
        return _pick(_AGENT, request, set())
    if kind == "requests" and name and "/" not in name:
        return _pick({("DELETE", ""): Operation.CANCEL_REQUEST}, request, set())
    raise CallerError(ErrorCode.INVALID_URI, f"there is nothing at {request.path}", field="uri")


def _pick(table: _Table, request: S3Request, names: set[str]) -> Operation:
    subresources = sorted(names & SUBRESOURCES)
    if len(subresources) > 1:
        problem = f"conflicting query parameters: {', '.join(subresources)}"
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=subresources[0])
    subresource = subresources[0] if subresources else ""
    operation = table.get((request.method, subresource))
    if operation is not None:
        return operation
    if subresource:
        problem = f"{request.method} with ?{subresource} is not implemented"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field=subresource)
    if request.method in _S3_METHODS and request.bucket not in ("", SERVICE_PREFIX):
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, f"{request.method} is not implemented here", field="method")
    raise CallerError(ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not allowed here", field="method")
