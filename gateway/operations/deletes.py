"""DeleteObject and DeleteObjects."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from descriptors.conditions import WriteCondition
from descriptors.errors import CallerError, ErrorCode
from descriptors.units import MIB
from gateway.call import Call
from gateway.operations.answers import xml_answer
from gateway.s3 import xml
from gateway.s3.conditions import delete_condition
from gateway.s3.parameters import NULL_VERSION, check_version
from gateway.s3.request import check_key
from gateway.s3.upload import announced_trailer, given_checksum
from gateway.s3.xml_in import DeleteEntry, parse_delete

DOCUMENT_BYTES_MAX = 8 * MIB


async def delete_object(call: Call) -> web.StreamResponse:
    check_key(call.request.key)
    check_version(call.request)
    condition = delete_condition(call.request.headers)
    await call.storage.objects.delete_object(call.access_key, call.request.bucket, call.request.key, condition)
    return web.Response(status=204)


async def delete_objects(call: Call) -> web.StreamResponse:
    """Keys without a condition of their own go in one step; each of the others by itself."""
    _check_has_digest(call.request.headers)
    manifest = await call.document(parse_delete, DOCUMENT_BYTES_MAX)
    deleted: list[tuple[str, str | None]] = []
    failures: list[xml.DeleteFailure] = []
    together: list[DeleteEntry] = []
    for entry in manifest.entries:
        problem = _refusal(entry)
        if problem is not None:
            failures.append(problem)
        elif entry.etag is None:
            together.append(entry)
        else:
            failures += await _delete_if(call, entry, deleted)
    if together:
        await call.storage.objects.delete_objects(
            call.access_key, call.request.bucket, [entry.key for entry in together]
        )
        deleted += [(entry.key, entry.version_id) for entry in together]
    else:
        await call.storage.objects.head_bucket(call.access_key, call.request.bucket)
    return xml_answer(xml.delete_document([] if manifest.quiet else deleted, failures))


def _check_has_digest(headers: Mapping[str, str]) -> None:
    """S3 takes no list of keys to delete without a digest of it, signed or not. Raises CallerError(InvalidRequest)."""
    if "content-md5" not in headers and given_checksum(headers) is None and announced_trailer(headers) is None:
        problem = "Missing required header for this request: Content-MD5 OR x-amz-checksum-*"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="content-md5")


async def _delete_if(call: Call, entry: DeleteEntry, deleted: list[tuple[str, str | None]]) -> list[xml.DeleteFailure]:
    try:
        await call.storage.objects.delete_object(
            call.access_key, call.request.bucket, entry.key, WriteCondition(if_match=entry.etag)
        )
    except CallerError as error:
        if error.code is ErrorCode.NO_SUCH_BUCKET:
            raise
        return [xml.DeleteFailure(entry.key, entry.version_id, error.code, error.message)]
    deleted.append((entry.key, entry.version_id))
    return []


def _refusal(entry: DeleteEntry) -> xml.DeleteFailure | None:
    if entry.version_id not in (None, NULL_VERSION):
        code, problem = ErrorCode.NO_SUCH_VERSION, "the only version is null"
        return xml.DeleteFailure(entry.key, entry.version_id, code, problem)
    try:
        check_key(entry.key)
    except CallerError as error:
        return xml.DeleteFailure(entry.key, entry.version_id, error.code, error.message)
    return None
