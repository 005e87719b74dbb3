"""AWS Signature Version 2 in the query: the presigned URLs that boto3 and `aws s3 presign` make by default.
Pure: the caller supplies the time.

For GET, HEAD and PUT of objects, and for HTML forms. Source: Amazon S3 Developer Guide, "Signing and authenticating
REST requests", query string request authentication alternative; "Browser-based uploads using POST".
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Mapping
from dataclasses import replace

from descriptors.errors import CallerError, ErrorCode
from descriptors.header_bytes import header_bytes
from gateway.s3.payload_form import PayloadForm
from gateway.s3.request import S3Request
from gateway.s3.sigv4 import PRESIGNED_S_MAX, Claim

_NAMES = ("AWSAccessKeyId", "Expires", "Signature")
_SECONDS = re.compile(r"[0-9]{1,12}\Z")
_SIGNED_PARAMETERS = frozenset(
    {
        "accelerate", "acl", "cors", "delete", "lifecycle", "location", "logging", "notification", "partNumber",
        "policy", "requestPayment", "response-cache-control", "response-content-disposition",
        "response-content-encoding", "response-content-language", "response-content-type", "response-expires",
        "restore", "storageClass", "tagging", "torrent", "uploadId", "uploads", "versionId", "versioning", "versions",
        "website",
    }
)  # fmt: skip
"""Query parameters that the signature covers; it does not cover others."""


def is_presigned(request: S3Request) -> bool:
    """Whether the URL carries a Version 2 signature."""
    return "AWSAccessKeyId" in request.parameters


def read_claim(request: S3Request) -> Claim:
    """The claim of the URL. Raises CallerError: AccessDenied where a parameter is missing, InvalidRequest where the
    headers have a signature, too.
    """
    parameters = request.parameters
    if "authorization" in request.headers:
        problem = "sign in the header or in the query, not in both"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="authorization")
    missing = [name for name in _NAMES if not parameters.get(name)]
    if missing:
        raise _denied(f"query-string authentication needs {', '.join(_NAMES)}", missing[0])
    if not _SECONDS.match(parameters["Expires"]):
        raise _denied("Expires must be a time in Unix seconds", "Expires")
    return _claim(parameters["AWSAccessKeyId"], parameters["Signature"])


def verify(request: S3Request, claim: Claim, secret_key: str, now_s: float) -> None:
    """Raises CallerError: AccessDenied for a URL that has expired, or is valid for too long; SignatureDoesNotMatch."""
    expires_s = int(request.parameters["Expires"])
    if expires_s < now_s:
        raise _denied("Request has expired", "Expires")
    if expires_s > now_s + PRESIGNED_S_MAX:
        raise _denied(f"a presigned URL may be valid for {PRESIGNED_S_MAX} seconds", "Expires")
    _check_signature(claim, secret_key, string_to_sign(request))


def is_signed_form(fields: Mapping[str, str]) -> bool:
    """Whether an HTML form, whose field names are in small letters, carries a Version 2 signature."""
    return "awsaccesskeyid" in fields


def read_form_claim(fields: Mapping[str, str]) -> Claim:
    """The claim of an HTML form. Raises CallerError: AccessDenied for one without a policy, InvalidArgument for one
    without a signature.
    """
    if "policy" not in fields:
        raise _denied("the form is not signed: it has no policy", "policy")
    if "signature" not in fields:
        problem = "Bucket POST must contain a field named 'signature'. Please check the order of the fields."
        raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field="signature")
    return _claim(fields["awsaccesskeyid"], fields["signature"])


def verify_form(policy: str, claim: Claim, secret_key: str) -> None:
    """Check the signature of a form's policy. Raises CallerError(SignatureDoesNotMatch)."""
    _check_signature(claim, secret_key, policy)


def with_signed_headers(request: S3Request) -> S3Request:
    """The request with the headers that its URL carries: presigning puts x-amz-*, content-type and content-md5 into the
    query. A header of the request itself has precedence.
    """
    carried = {name: value for name, value in request.query if _is_header(name)}
    return replace(request, headers={**carried, **request.headers}) if carried else request


def string_to_sign(request: S3Request) -> str:
    """The text that is signed: verb, digest, type, expiry, x-amz- headers, resource."""
    headers = with_signed_headers(request).headers
    lines = [
        request.method,
        headers.get("content-md5", ""),
        headers.get("content-type", ""),
        request.parameters["Expires"],
        *[f"{name}:{headers[name].strip()}" for name in sorted(headers) if name.startswith("x-amz-")],
        _resource(request),
    ]
    return "\n".join(lines)


def _claim(access_key: str, signature: str) -> Claim:
    return Claim(
        access_key=access_key,
        scope="",
        date="",
        signed_headers=(),
        signature=signature,
        payload_hash=PayloadForm.UNSIGNED.value,
        presigned_s=0,
    )


def _check_signature(claim: Claim, secret_key: str, text: str) -> None:
    signed = hmac.digest(secret_key.encode(), header_bytes(text), "sha1")
    if not hmac.compare_digest(base64.b64encode(signed), header_bytes(claim.signature)):
        raise CallerError(
            ErrorCode.SIGNATURE_DOES_NOT_MATCH,
            "The request signature we calculated does not match the signature you provided. Check your key and signing"
            " method.",
            field="Signature",
        )


def _resource(request: S3Request) -> str:
    path = request.raw_path or "/"
    if request.host_bucket is not None:
        path = f"/{request.host_bucket}{path}"
    signed = sorted((name, value) for name, value in request.query if name in _SIGNED_PARAMETERS)
    query = "&".join(f"{name}={value}" if value else name for name, value in signed)
    return f"{path}?{query}" if query else path


def _is_header(name: str) -> bool:
    return name.startswith("x-amz-") or name in ("content-type", "content-md5")


def _denied(problem: str, field: str) -> CallerError:
    return CallerError(ErrorCode.ACCESS_DENIED, problem, field=field)
