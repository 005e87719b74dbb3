"""Every error that ObjectCache gives, in three families, with one total table from error code to HTTP status.

* `CallerError`: the request is wrong; repeating it cannot help.
* `ChunkUnavailable`: a chunk is missing or unreadable; the caller recomputes from that chunk (soft).
* `ServerError`: the server failed; `retryable` says whether the same request may succeed later.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class ErrorCode(Enum):
    """The error codes of S3. Where S3 has no code for an error, a name in the same style."""

    ACCESS_DENIED = "AccessDenied"
    ACCESS_FORBIDDEN = "AccessForbidden"
    AGENT_CONFLICT = "AgentConflict"
    AUTHORIZATION_HEADER_MALFORMED = "AuthorizationHeaderMalformed"
    AUTHORIZATION_QUERY_ERROR = "AuthorizationQueryParametersError"
    BAD_DIGEST = "BadDigest"
    BAD_REQUEST = "BadRequest"
    BUCKET_ALREADY_EXISTS = "BucketAlreadyExists"
    BUCKET_ALREADY_OWNED = "BucketAlreadyOwnedByYou"
    BUCKET_NOT_EMPTY = "BucketNotEmpty"
    CANCELLED = "RequestCancelled"
    CHUNK_CORRUPT = "ChunkCorrupt"
    CHUNK_SIZE_MISMATCH = "ChunkSizeMismatch"
    CONDITIONAL_CONFLICT = "ConditionalRequestConflict"
    ENTITY_TOO_LARGE = "EntityTooLarge"
    ENTITY_TOO_SMALL = "EntityTooSmall"
    EXPIRED_TOKEN = "ExpiredToken"
    ILLEGAL_LOCATION = "IllegalLocationConstraintException"
    INCOMPLETE_BODY = "IncompleteBody"
    INCORRECT_NUMBER_OF_FILES = "IncorrectNumberOfFilesInPostRequest"
    INSUFFICIENT_STORAGE = "InsufficientStorage"
    INTERNAL_ERROR = "InternalError"
    INVALID_ACCESS_KEY_ID = "InvalidAccessKeyId"
    INVALID_ARGUMENT = "InvalidArgument"
    INVALID_BUCKET_NAME = "InvalidBucketName"
    INVALID_DESCRIPTOR = "InvalidDescriptor"
    INVALID_DIGEST = "InvalidDigest"
    INVALID_PART = "InvalidPart"
    INVALID_PART_NUMBER = "InvalidPartNumber"
    INVALID_PART_ORDER = "InvalidPartOrder"
    INVALID_POLICY_DOCUMENT = "InvalidPolicyDocument"
    INVALID_RANGE = "InvalidRange"
    INVALID_REQUEST = "InvalidRequest"
    INVALID_STORAGE_CLASS = "InvalidStorageClass"
    INVALID_TAG = "InvalidTag"
    INVALID_URI = "InvalidURI"
    KEY_TOO_LONG = "KeyTooLongError"
    MALFORMED_POST_REQUEST = "MalformedPOSTRequest"
    MALFORMED_TRAILER = "MalformedTrailerError"
    MALFORMED_XML = "MalformedXML"
    MAX_POST_PRE_DATA_LENGTH = "MaxPostPreDataLengthExceededError"
    METADATA_TOO_LARGE = "MetadataTooLarge"
    METHOD_NOT_ALLOWED = "MethodNotAllowed"
    MISSING_CONTENT_LENGTH = "MissingContentLength"
    MISSING_REQUEST_BODY = "MissingRequestBodyError"
    NOT_IMPLEMENTED = "NotImplemented"
    NOT_MODIFIED = "NotModified"
    NO_SUCH_AGENT = "NoSuchAgent"
    NO_SUCH_BUCKET = "NoSuchBucket"
    NO_SUCH_CHUNK = "NoSuchChunk"
    NO_SUCH_KEY = "NoSuchKey"
    NO_SUCH_CORS = "NoSuchCORSConfiguration"
    NO_SUCH_ENCRYPTION = "ServerSideEncryptionConfigurationNotFoundError"
    NO_SUCH_LIFECYCLE = "NoSuchLifecycleConfiguration"
    NO_SUCH_OBJECT_LOCK = "ObjectLockConfigurationNotFoundError"
    NO_SUCH_OWNERSHIP_CONTROLS = "OwnershipControlsNotFoundError"
    NO_SUCH_POLICY = "NoSuchBucketPolicy"
    NO_SUCH_PUBLIC_ACCESS_BLOCK = "NoSuchPublicAccessBlockConfiguration"
    NO_SUCH_REPLICATION = "ReplicationConfigurationNotFoundError"
    NO_SUCH_TAG_SET = "NoSuchTagSet"
    NO_SUCH_UPLOAD = "NoSuchUpload"
    NO_SUCH_VERSION = "NoSuchVersion"
    NO_SUCH_WEBSITE = "NoSuchWebsiteConfiguration"
    PRECONDITION_FAILED = "PreconditionFailed"
    REQUEST_HEADERS_TOO_LARGE = "RequestHeaderSectionTooLarge"
    REQUEST_REPLAYED = "RequestReplayed"
    REQUEST_TIMEOUT = "RequestTimeout"
    REQUEST_TIME_TOO_SKEWED = "RequestTimeTooSkewed"
    SIGNATURE_DOES_NOT_MATCH = "SignatureDoesNotMatch"
    SLOW_DOWN = "SlowDown"
    TARGET_UNREACHABLE = "TargetUnreachable"
    TOO_MANY_BUCKETS = "TooManyBuckets"
    X_AMZ_CONTENT_SHA256_MISMATCH = "XAmzContentSHA256Mismatch"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.ACCESS_DENIED: 403,
    ErrorCode.ACCESS_FORBIDDEN: 403,
    ErrorCode.AGENT_CONFLICT: 409,
    ErrorCode.AUTHORIZATION_HEADER_MALFORMED: 400,
    ErrorCode.AUTHORIZATION_QUERY_ERROR: 400,
    ErrorCode.BAD_DIGEST: 400,
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.BUCKET_ALREADY_EXISTS: 409,
    ErrorCode.BUCKET_ALREADY_OWNED: 409,
    ErrorCode.BUCKET_NOT_EMPTY: 409,
    ErrorCode.CANCELLED: 409,
    ErrorCode.CHUNK_CORRUPT: 500,
    ErrorCode.CHUNK_SIZE_MISMATCH: 404,
    ErrorCode.CONDITIONAL_CONFLICT: 409,
    ErrorCode.ENTITY_TOO_LARGE: 400,
    ErrorCode.ENTITY_TOO_SMALL: 400,
    ErrorCode.EXPIRED_TOKEN: 400,
    ErrorCode.ILLEGAL_LOCATION: 400,
    ErrorCode.INCOMPLETE_BODY: 400,
    ErrorCode.INCORRECT_NUMBER_OF_FILES: 400,
    ErrorCode.INSUFFICIENT_STORAGE: 507,
    ErrorCode.INTERNAL_ERROR: 500,
    ErrorCode.INVALID_ACCESS_KEY_ID: 403,
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.INVALID_BUCKET_NAME: 400,
    ErrorCode.INVALID_DESCRIPTOR: 400,
    ErrorCode.INVALID_DIGEST: 400,
    ErrorCode.INVALID_PART: 400,
    ErrorCode.INVALID_PART_NUMBER: 416,
    ErrorCode.INVALID_PART_ORDER: 400,
    ErrorCode.INVALID_POLICY_DOCUMENT: 400,
    ErrorCode.INVALID_RANGE: 416,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.INVALID_STORAGE_CLASS: 400,
    ErrorCode.INVALID_TAG: 400,
    ErrorCode.INVALID_URI: 400,
    ErrorCode.KEY_TOO_LONG: 400,
    ErrorCode.MALFORMED_POST_REQUEST: 400,
    ErrorCode.MALFORMED_TRAILER: 400,
    ErrorCode.MALFORMED_XML: 400,
    ErrorCode.MAX_POST_PRE_DATA_LENGTH: 400,
    ErrorCode.METADATA_TOO_LARGE: 400,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.MISSING_CONTENT_LENGTH: 411,
    ErrorCode.MISSING_REQUEST_BODY: 400,
    ErrorCode.NOT_IMPLEMENTED: 501,
    ErrorCode.NOT_MODIFIED: 304,
    ErrorCode.NO_SUCH_AGENT: 404,
    ErrorCode.NO_SUCH_BUCKET: 404,
    ErrorCode.NO_SUCH_CHUNK: 404,
    ErrorCode.NO_SUCH_KEY: 404,
    ErrorCode.NO_SUCH_CORS: 404,
    ErrorCode.NO_SUCH_ENCRYPTION: 404,
    ErrorCode.NO_SUCH_LIFECYCLE: 404,
    ErrorCode.NO_SUCH_OBJECT_LOCK: 404,
    ErrorCode.NO_SUCH_OWNERSHIP_CONTROLS: 404,
    ErrorCode.NO_SUCH_POLICY: 404,
    ErrorCode.NO_SUCH_PUBLIC_ACCESS_BLOCK: 404,
    ErrorCode.NO_SUCH_REPLICATION: 404,
    ErrorCode.NO_SUCH_TAG_SET: 404,
    ErrorCode.NO_SUCH_WEBSITE: 404,
    ErrorCode.NO_SUCH_UPLOAD: 404,
    ErrorCode.NO_SUCH_VERSION: 404,
    ErrorCode.PRECONDITION_FAILED: 412,
    ErrorCode.REQUEST_HEADERS_TOO_LARGE: 400,
    ErrorCode.REQUEST_REPLAYED: 409,
    ErrorCode.REQUEST_TIMEOUT: 400,
    ErrorCode.REQUEST_TIME_TOO_SKEWED: 403,
    ErrorCode.SIGNATURE_DOES_NOT_MATCH: 403,
    ErrorCode.SLOW_DOWN: 503,
    ErrorCode.TARGET_UNREACHABLE: 500,
    ErrorCode.TOO_MANY_BUCKETS: 400,
    ErrorCode.X_AMZ_CONTENT_SHA256_MISMATCH: 400,
}


class ObjectCacheError(Exception):
    """Base of every error that reaches a caller.

    `field` names the part of the request that was wrong, `index` the first bad chunk (0-based, prefix order) and
    `layer` the first layer that will not come, when a transfer failed.
    """

    retryable = False
    retry_after_s: int | None = None
    tries = 0
    """How often a client has made the call before it gave up; 0 where nobody has tried again."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        field: str | None = None,
        index: int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.index = index
        self.layer = layer

    @property
    def http_status(self) -> int:
        """The HTTP status of the answer with this error."""
        return HTTP_STATUS[self.code]

    def to_fields(self) -> dict[str, Any]:
        """The error as a JSON object; absent parts are left out. `error_from_fields` is its inverse."""
        parts = {
            "code": self.code.value,
            "message": self.message,
            "field": self.field,
            "index": self.index,
            "layer": self.layer,
            "retry_after_s": self.retry_after_s,
        }
        return {name: value for name, value in parts.items() if value is not None}


class CallerError(ObjectCacheError):
    """The request is wrong; the same request will fail again."""


class ChunkUnavailable(ObjectCacheError):
    """A chunk is missing, has the wrong size or cannot be read: recompute from chunk `index`."""

    def at(self, index: int) -> ChunkUnavailable:
        """The same of a chunk that the caller knows by another index."""
        field = f"chunk_keys[{index}]"
        message = self.message.replace(f"chunk_keys[{self.index}]", field)
        return ChunkUnavailable(self.code, message, field=field, index=index, layer=self.layer)


class ServerError(ObjectCacheError):
    """The server failed. `retryable` says whether the same request can succeed later, `retry_after_s` when."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retryable: bool = False,
        field: str | None = None,
        index: int | None = None,
        layer: int | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(code, message, field=field, index=index, layer=layer)
        self.retryable = retryable
        self.retry_after_s = retry_after_s


CHUNK_CODES = frozenset({ErrorCode.NO_SUCH_CHUNK, ErrorCode.CHUNK_SIZE_MISMATCH, ErrorCode.CHUNK_CORRUPT})
RETRYABLE_CODES = frozenset({ErrorCode.SLOW_DOWN, ErrorCode.INTERNAL_ERROR, ErrorCode.INSUFFICIENT_STORAGE})


def make_error(
    code: ErrorCode,
    message: str,
    *,
    field: str | None = None,
    index: int | None = None,
    layer: int | None = None,
    retry_after_s: int | None = None,
) -> ObjectCacheError:
    """The error for `code`, in the family that the code belongs to."""
    if code in CHUNK_CODES:
        return ChunkUnavailable(code, message, field=field, index=index, layer=layer)
    if HTTP_STATUS[code] < 500 or code is ErrorCode.NOT_IMPLEMENTED:
        return CallerError(code, message, field=field, index=index, layer=layer)
    return ServerError(
        code,
        message,
        retryable=code in RETRYABLE_CODES,
        field=field,
        index=index,
        layer=layer,
        retry_after_s=retry_after_s,
    )


def error_from_fields(fields: dict[str, Any]) -> ObjectCacheError:
    """Rebuild an error from `to_fields`; an unknown code becomes InternalError and keeps its text."""
    message = str(fields.get("message", ""))
    try:
        code = ErrorCode(fields.get("code"))
    except ValueError:
        code, message = ErrorCode.INTERNAL_ERROR, f"{fields.get('code')}: {message}"
    parts = {name: fields.get(name) for name in ("field", "index", "layer", "retry_after_s")}
    return make_error(code, message, **parts)
