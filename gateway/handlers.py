"""The function that answers each operation, as one total table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from gateway.call import Call
from gateway.operations import (
    absent,
    buckets,
    copies,
    deletes,
    forms,
    layerwise,
    listings,
    object_details,
    objects,
    rdma_objects,
    uploads,
)
from gateway.operations.answers import EXPECTED_OWNER, check_expected_owner
from gateway.s3.request import check_bucket_name
from gateway.s3.routing import Operation

Handler = Callable[[Call], Awaitable[web.StreamResponse]]

LAYERWISE: dict[Operation, Handler] = {
    Operation.LAYERWISE: layerwise.layerwise,
    Operation.LAYERWISE_HEADER: layerwise.layerwise_header,
    Operation.LOOKUP: layerwise.lookup,
    Operation.PUT_CHUNKS: rdma_objects.put_chunks,
    Operation.TRANSPORTS: layerwise.transports,
    Operation.SCHEDULER: layerwise.scheduler,
    Operation.REGISTER_AGENT: layerwise.register_agent,
    Operation.RENEW_AGENT: layerwise.renew_agent,
    Operation.DELETE_AGENT: layerwise.delete_agent,
    Operation.CANCEL_REQUEST: layerwise.cancel_request,
}
"""The operations that S3 does not have. They must not be presigned, since a presigned request can be replayed for days,
and their bodies must be signed.
"""

_WITHOUT_BUCKET: dict[Operation, Handler] = {
    Operation.LIST_BUCKETS: buckets.list_buckets,
    Operation.CREATE_BUCKET: buckets.create_bucket,
}
_IN_BUCKET: dict[Operation, Handler] = {
    Operation.HEAD_BUCKET: buckets.head_bucket,
    Operation.DELETE_BUCKET: buckets.delete_bucket,
    Operation.GET_BUCKET_LOCATION: buckets.get_location,
    Operation.GET_BUCKET_VERSIONING: buckets.get_versioning,
    Operation.GET_BUCKET_ACL: buckets.get_acl,
    Operation.PUT_BUCKET_ACL: buckets.put_acl,
    Operation.GET_LIFECYCLE: buckets.get_lifecycle,
    Operation.PUT_LIFECYCLE: buckets.put_lifecycle,
    Operation.DELETE_LIFECYCLE: buckets.delete_lifecycle,
    **dict.fromkeys(absent.CODES, absent.get_absent),
    Operation.LIST_OBJECTS: listings.list_objects,
    Operation.LIST_OBJECTS_V2: listings.list_objects_v2,
    Operation.LIST_OBJECT_VERSIONS: listings.list_object_versions,
    Operation.LIST_UPLOADS: uploads.list_uploads,
    Operation.DELETE_OBJECTS: deletes.delete_objects,
    Operation.PUT_OBJECT: objects.put_object,
    Operation.POST_OBJECT: forms.post_object,
    Operation.COPY_OBJECT: copies.copy_object,
    Operation.GET_OBJECT: objects.get_object,
    Operation.HEAD_OBJECT: objects.head_object,
    Operation.DELETE_OBJECT: deletes.delete_object,
    Operation.GET_OBJECT_ATTRIBUTES: object_details.get_attributes,
    Operation.GET_OBJECT_ACL: object_details.get_acl,
    Operation.PUT_OBJECT_ACL: object_details.put_acl,
    Operation.GET_OBJECT_TAGGING: object_details.get_tagging,
    Operation.PUT_OBJECT_TAGGING: object_details.put_tagging,
    Operation.DELETE_OBJECT_TAGGING: object_details.delete_tagging,
    Operation.CREATE_UPLOAD: uploads.create_upload,
    Operation.UPLOAD_PART: uploads.upload_part,
    Operation.COPY_PART: copies.copy_part,
    Operation.COMPLETE_UPLOAD: uploads.complete_upload,
    Operation.ABORT_UPLOAD: uploads.abort_upload,
    Operation.LIST_PARTS: uploads.list_parts,
}


def _of_expected_owner(handler: Handler) -> Handler:
    """The handler, called only if x-amz-expected-bucket-owner holds. For a name that no bucket can have the check
    answers InvalidBucketName.
    """

    async def handle(call: Call) -> web.StreamResponse:
        try:
            await check_expected_owner(call, EXPECTED_OWNER, call.request.bucket)
            return await handler(call)
        except CallerError as error:
            if error.code is ErrorCode.NO_SUCH_BUCKET:
                check_bucket_name(call.request.bucket)
            raise

    return handle


S3 = _WITHOUT_BUCKET | {operation: _of_expected_owner(handler) for operation, handler in _IN_BUCKET.items()}
HANDLERS = S3 | LAYERWISE
