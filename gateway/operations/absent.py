"""Bucket configurations that S3 has and this server lacks. A GET answers with S3's error for an absent
configuration.
"""

from __future__ import annotations

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from gateway.call import Call
from gateway.s3.routing import Operation

CODES = {
    Operation.GET_BUCKET_POLICY: (ErrorCode.NO_SUCH_POLICY, "The bucket policy does not exist"),
    Operation.GET_BUCKET_CORS: (ErrorCode.NO_SUCH_CORS, "The CORS configuration does not exist"),
    Operation.GET_BUCKET_ENCRYPTION: (
        ErrorCode.NO_SUCH_ENCRYPTION,
        "The server side encryption configuration was not found",
    ),
    Operation.GET_BUCKET_TAGGING: (ErrorCode.NO_SUCH_TAG_SET, "The TagSet does not exist"),
    Operation.GET_BUCKET_WEBSITE: (
        ErrorCode.NO_SUCH_WEBSITE,
        "The specified bucket does not have a website configuration",
    ),
    Operation.GET_PUBLIC_ACCESS_BLOCK: (
        ErrorCode.NO_SUCH_PUBLIC_ACCESS_BLOCK,
        "The public access block configuration was not found",
    ),
    Operation.GET_OWNERSHIP_CONTROLS: (
        ErrorCode.NO_SUCH_OWNERSHIP_CONTROLS,
        "The bucket ownership controls were not found",
    ),
    Operation.GET_REPLICATION: (ErrorCode.NO_SUCH_REPLICATION, "The replication configuration was not found"),
    Operation.GET_OBJECT_LOCK: (
        ErrorCode.NO_SUCH_OBJECT_LOCK,
        "Object Lock configuration does not exist for this bucket",
    ),
}


async def get_absent(call: Call) -> web.StreamResponse:
    """Raises CallerError: the error code of the configuration, or NoSuchBucket."""
    await call.storage.objects.head_bucket(call.access_key, call.request.bucket)
    code, problem = CODES[call.operation]
    raise CallerError(code, problem, field="bucket")
