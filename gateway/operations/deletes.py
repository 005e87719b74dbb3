"""DeleteObject and DeleteObjects."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from descriptors.conditions import WriteCondition
from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import NotDeleted
from descriptors.units import MIB
from gateway.call import Call
from gateway.operations.answers import xml_pages
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
        failed = await _delete_together(call, [entry.key for entry in together], has_deleted=bool(deleted))
        for entry in together:
            kept = failed.get(entry.key)
            if kept is None:
                deleted.append((entry.key, entry.version_id))
            else:
                failures.append(xml.DeleteFailure(entry.key, entry.version_id, kept.code, kept.message))
    else:
        await call.storage.objects.head_bucket(call.access_key, call.request.bucket)
    told = [] if manifest.quiet else deleted
    return await xml_pages(lambda: xml.delete_document(told, failures), len(told) + len(failures))


def _check_has_digest(headers: Mapping[str, str]) -> None:
    """S3 takes no list of keys to delete without a digest of it, signed or not. Raises CallerError(InvalidRequest)."""
    if "content-md5" not in headers and given_checksum(headers) is None and announced_trailer(headers) is None:
        problem = "Missing required header for this request: Content-MD5 OR x-amz-checksum-*"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="content-md5")


async def _delete_together(call: Call, keys: list[str], *, has_deleted: bool) -> dict[str, NotDeleted]:
    """The keys that were not deleted. Raises ServerError where that holds for all keys of the request: a client tries
    the whole request again then.
    """
    try:
        failed = await call.storage.objects.delete_objects(call.access_key, call.request.bucket, keys)
    except ServerError as error:
        if not has_deleted:
            raise
        failed = [NotDeleted(key, error.code.value, error.message) for key in keys]
    return {each.key: each for each in failed}


async def _delete_if(call: Call, entry: DeleteEntry, deleted: list[tuple[str, str | None]]) -> list[xml.DeleteFailure]:
    try:
        await call.storage.objects.delete_object(
            call.access_key, call.request.bucket, entry.key, WriteCondition(if_match=entry.etag)
        )
    except (CallerError, ServerError) as error:
        if error.code is ErrorCode.NO_SUCH_BUCKET or (isinstance(error, ServerError) and not deleted):
            raise
        return [xml.DeleteFailure(entry.key, entry.version_id, error.code.value, error.message)]
    deleted.append((entry.key, entry.version_id))
    return []


def _refusal(entry: DeleteEntry) -> xml.DeleteFailure | None:
    if entry.version_id not in (None, NULL_VERSION):
        code, problem = ErrorCode.NO_SUCH_VERSION, "the only version is null"
        return xml.DeleteFailure(entry.key, entry.version_id, code.value, problem)
    try:
        check_key(entry.key)
    except CallerError as error:
        return xml.DeleteFailure(entry.key, entry.version_id, error.code.value, error.message)
    return None
