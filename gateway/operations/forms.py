"""POST Object: a browser's upload by HTML form."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote, urlencode, urlsplit

from aiohttp import web

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ObjectInfo, PutRequest
from gateway.call import Call
from gateway.form_upload import FormBody
from gateway.operations.answers import stored_headers_of, xml_answer
from gateway.s3 import xml_uploads
from gateway.s3.object_headers import new_attributes, refuse_unsupported
from gateway.s3.payload_form import PayloadForm
from gateway.s3.post_policy import parse_policy
from gateway.s3.request import S3Request, check_key
from gateway.s3.sigv4 import PRESIGNED_S_MAX
from gateway.s3.upload import plan_body
from gateway.s3.xml_in import parse_tagging

_CONTENT_FIELDS = ("cache-control", "content-type", "content-disposition", "content-encoding", "expires")
_SIGNING_FIELDS = ("x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-signature")
_FILE_NAME = "${filename}"
_REDIRECTS = ("success_action_redirect", "redirect")
_STATUSES = {"200": 200, "201": 201}
_NO_CONTENT = 204
_SEE_OTHER = 303


async def post_object(call: Call) -> web.StreamResponse:
    """Store the file of a form, as its policy allows. The signature of the policy has been checked."""
    form, bucket = call.form, call.request.bucket
    if form is None:
        problem = "Bucket POST must be of the enclosure-type multipart/form-data, with a signed policy"
        raise CallerError(ErrorCode.PRECONDITION_FAILED, problem, field="content-type")
    policy = parse_policy(form.fields["policy"])
    key = form.fields.get("key", "").replace(_FILE_NAME, form.file_name)
    if not key:
        problem = (
            "Bucket POST must contain a field named 'key'. If it is specified, please check the order of the fields."
        )
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="key")
    call.trace.key = key
    fields = {**form.fields, "key": key}
    if fields.setdefault("bucket", bucket) != bucket:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, "the form names another bucket than its address", field="bucket")
    now_s = time.time()
    policy.check(fields, now_s)
    if call.claim.is_version_2 and policy.expires_at > now_s + PRESIGNED_S_MAX:
        problem = f"a policy with a Version 2 signature may be valid for {PRESIGNED_S_MAX} seconds"
        raise CallerError(ErrorCode.ACCESS_DENIED, problem, field="policy")
    check_key(key)
    headers = _headers(fields)
    refuse_unsupported(headers)
    attributes = new_attributes(headers)
    if "tagging" in fields:
        attributes = replace(attributes, tags=parse_tagging(fields["tagging"].encode()))
    async with form.file(call.access_key, call.held_forms, call.settings, policy.most_bytes) as file:
        policy.check_bytes(file.nbytes)
        described = S3Request("PUT", "", (), {**headers, "content-length": str(file.nbytes)})
        plan = plan_body(described, PayloadForm.UNSIGNED, None)
        call.trace.nbytes = file.nbytes
        put = PutRequest(bucket, key, file.nbytes, attributes, plan.checksum)
        info = await call.storage.objects.put_object(call.access_key, put, FormBody(file, plan.digests))
    return await _answer(call, fields, info)


def _headers(fields: Mapping[str, str]) -> dict[str, str]:
    """The headers that a PUT of the same object would have."""
    headers = {name: fields[name] for name in _CONTENT_FIELDS if name in fields}
    headers |= {n: value for n, value in fields.items() if n.startswith("x-amz-") and n not in _SIGNING_FIELDS}
    if "acl" in fields:
        headers["x-amz-acl"] = fields["acl"]
    return headers


async def _answer(call: Call, fields: Mapping[str, str], info: ObjectInfo) -> web.Response:
    request, etag = call.request, f'"{info.etag}"'
    path = f"/{info.key}" if request.host_bucket is not None else f"/{request.bucket}/{info.key}"
    location = f"{call.http.scheme}://{request.headers.get('host', '')}{quote(path, safe='/-_.~')}"
    headers = {**await stored_headers_of(call, request.bucket, info), "Location": location}
    redirect = next((_redirect(fields[name]) for name in _REDIRECTS if name in fields), None)
    if redirect is not None:
        query = urlencode({"bucket": request.bucket, "key": info.key, "etag": etag})
        headers["Location"] = f"{redirect}{'&' if '?' in redirect else '?'}{query}"
        return web.Response(status=_SEE_OTHER, headers=headers)
    status = _STATUSES.get(fields.get("success_action_status", ""), _NO_CONTENT)
    if status == 201:
        response = xml_answer(xml_uploads.posted_document(location, request.bucket, info), headers)
        response.set_status(status)
        return response
    return web.Response(status=status, headers=headers)


def _redirect(text: str) -> str | None:
    """An address to go to after the upload; as in S3, one that is none is passed over."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    is_address = parts.scheme in ("http", "https") and bool(parts.netloc)
    return text if is_address and text.isascii() and text.isprintable() and " " not in text else None
