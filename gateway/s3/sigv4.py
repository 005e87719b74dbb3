"""AWS Signature Version 4 verification, in headers and in presigned URLs. Pure: the caller supplies the time.

Source: AWS General Reference, "Signature Version 4", with S3's rules (path encoded once, payload hash in a header).
`payload_form` explains the payload hash, and `aws_chunked` verifies the signatures of chunks.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from urllib.parse import quote

from descriptors.errors import CallerError, ErrorCode
from descriptors.header_bytes import header_bytes
from gateway.s3.payload_form import PayloadForm, payload_form
from gateway.s3.request import S3Request

ALGORITHM = "AWS4-HMAC-SHA256"
PAYLOAD_HASH = "x-amz-content-sha256"
SKEW_S = 15 * 60
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
SIGNING_KEYS_MAX = 256
PRESIGNED_S_MAX = 7 * 24 * 3600
UNSUPPORTED = "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256."
_DATE = re.compile(r"[0-9]{8}T[0-9]{6}Z\Z")
_SPACES = re.compile(r" +")
_NUMBER = re.compile(r"-?[0-9]{1,19}\Z")
_ASYMMETRIC = "AWS4-ECDSA-P256-SHA256"


@dataclass(frozen=True, slots=True)
class Claim:
    """The signature that a request carries, and the terms that it states."""

    access_key: str
    scope: str
    date: str
    signed_headers: tuple[str, ...]
    signature: str
    payload_hash: str
    presigned_s: int | None

    @property
    def is_version_2(self) -> bool:
        """Whether the signature is a Version 2 signature, which has no scope."""
        return not self.scope

    @property
    def region(self) -> str:
        """The region that the scope names."""
        return self.scope.split("/")[1]

    @property
    def form(self) -> PayloadForm:
        """The form of the body: how it is coded, and what of it is signed."""
        return payload_form(self.payload_hash)

    @property
    def body_sha256(self) -> str | None:
        """The digest the body must have, or None where the body was not signed as a whole."""
        return self.payload_hash.lower() if self.form is PayloadForm.SIGNED else None


def read_claim(request: S3Request) -> Claim:
    """The claim of a request. Raises CallerError for anonymous, malformed or unsupported authentication, and names the
    wrong part.
    """
    parameters = request.parameters
    if "X-Amz-Signature" in parameters or "X-Amz-Algorithm" in parameters:
        return _claim_from_query(request)
    authorization = request.headers.get("authorization")
    if authorization:
        return _claim_from_header(request, authorization)
    if "AWSAccessKeyId" in parameters:
        raise _unsupported()
    raise CallerError(ErrorCode.ACCESS_DENIED, "the request is not signed", field="authorization")


def verify(request: S3Request, claim: Claim, secret_key: str, region: str, now_s: float) -> bytes:
    """The signing key, which also signs chunks of the body.

    Raises CallerError: RequestTimeTooSkewed, AuthorizationHeaderMalformed, AccessDenied,
    SignatureDoesNotMatch, InvalidRequest.
    """
    _check_time(claim, now_s)
    _check_scope(claim, region)
    _check_signed_headers(request, claim)
    key = signing_key(secret_key, claim.scope)
    # Most clients sign the path as S3 encodes it, some (curl) as they send it; either way the request is the same.
    paths = dict.fromkeys((encoded_path(request), request.raw_path or "/"))
    if not any(_is_signed(request, claim, path, key, trim) for trim in _TRIMS for path in paths):
        if claim.presigned_s is None and PAYLOAD_HASH not in request.headers:
            raise _payload_hash_missing()  # the hash that the client signed is unknown
        raise CallerError(
            ErrorCode.SIGNATURE_DOES_NOT_MATCH,
            "The request signature we calculated does not match the signature you provided. Check your key and signing"
            " method.",
            field="X-Amz-Signature" if claim.presigned_s is not None else "authorization",
        )
    return key


def read_form_claim(fields: Mapping[str, str]) -> Claim:
    """The claim of an HTML form, whose field names are in small letters. Raises CallerError: AccessDenied for a form
    without a policy, InvalidArgument for a field that is missing, InvalidRequest, AuthorizationQueryParametersError.
    """
    if "policy" not in fields:
        raise CallerError(ErrorCode.ACCESS_DENIED, "the form is not signed: it has no policy", field="policy")
    for name in ("X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Signature"):
        if name.lower() not in fields:
            problem = f"Bucket POST must contain a field named '{name}'. Please check the order of the fields."
            raise CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=name)
    if fields["x-amz-algorithm"] != ALGORITHM:
        raise _unsupported("X-Amz-Algorithm")

    def malformed(problem: str) -> CallerError:
        return CallerError(ErrorCode.AUTHORIZATION_QUERY_ERROR, problem, field="X-Amz-Credential")

    signed = {"Credential": fields["x-amz-credential"], "SignedHeaders": "", "Signature": fields["x-amz-signature"]}
    return _claim(signed, fields["x-amz-date"], PayloadForm.UNSIGNED.value, PRESIGNED_S_MAX, malformed)


def verify_form(policy: str, claim: Claim, secret_key: str, region: str, now_s: float) -> None:
    """Check the signature of a form's policy. Raises CallerError: AccessDenied, AuthorizationQueryParametersError,
    SignatureDoesNotMatch.
    """
    _check_time(claim, now_s)
    _check_scope(claim, region)
    if not _is_signature(claim, signing_key(secret_key, claim.scope), policy):
        problem = "The request signature we calculated does not match the signature you provided."
        raise CallerError(ErrorCode.SIGNATURE_DOES_NOT_MATCH, problem, field="X-Amz-Signature")


def encoded_path(request: S3Request) -> str:
    """The path in the form of S3's canonical request."""
    return quote(request.path, safe="/-_.~")


def trimmed(value: str) -> str:
    """A header's value in the form of S3's canonical request: no spaces around it, and one space where there were
    several. Only U+0020 counts as a space.
    """
    return _SPACES.sub(" ", value.strip(" "))


def trimmed_widely(value: str) -> str:
    """A header's value as botocore signs it: every kind of space counts."""
    return " ".join(value.split())


_TRIMS = (trimmed, trimmed_widely)
"""The two canonical forms of a header value; both stand for the value that was sent."""


def canonical_request(request: S3Request, claim: Claim, path: str, trim: Callable[[str], str] = trimmed) -> str:
    """The canonical request: method, path, query, headers, signed names, payload hash."""
    skip = "X-Amz-Signature" if claim.presigned_s is not None else None
    query = sorted((_encode(name), _encode(value)) for name, value in request.query if name != skip)
    headers = [f"{name}:{trim(request.headers.get(name, ''))}\n" for name in claim.signed_headers]
    return "\n".join(
        (
            request.method,
            path,
            "&".join(f"{name}={value}" for name, value in query),
            "".join(headers),
            ";".join(claim.signed_headers),
            claim.payload_hash,
        )
    )


def _is_signed(request: S3Request, claim: Claim, path: str, key: bytes, trim: Callable[[str], str]) -> bool:
    hashed = hashlib.sha256(header_bytes(canonical_request(request, claim, path, trim))).hexdigest()
    return _is_signature(claim, key, "\n".join((ALGORITHM, claim.date, claim.scope, hashed)))


def _is_signature(claim: Claim, key: bytes, string_to_sign: str) -> bool:
    expected = hmac.digest(key, header_bytes(string_to_sign), "sha256").hex()
    return hmac.compare_digest(expected.encode(), header_bytes(claim.signature))


@lru_cache(maxsize=SIGNING_KEYS_MAX)
def signing_key(secret_key: str, scope: str) -> bytes:
    """The key of a credential scope (date/region/service/aws4_request), cached, because it is the same
    for a whole day.
    """
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, header_bytes(part), "sha256")
    return key


def _claim_from_header(request: S3Request, authorization: str) -> Claim:
    scheme, _, rest = authorization.partition(" ")
    if scheme == _ASYMMETRIC:
        raise _asymmetric("authorization")
    if scheme != ALGORITHM:
        raise _unsupported()

    def malformed(problem: str) -> CallerError:
        return CallerError(ErrorCode.AUTHORIZATION_HEADER_MALFORMED, problem, field="authorization")

    fields: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name in fields:
            raise malformed("the header must have Credential, SignedHeaders and Signature, each once")
        fields[name] = value
    if set(fields) != {"Credential", "SignedHeaders", "Signature"}:
        raise malformed("the header must have Credential, SignedHeaders and Signature, each once")
    payload_hash = request.headers.get(PAYLOAD_HASH)
    if payload_hash is None and not request.content_length and "transfer-encoding" not in request.headers:
        payload_hash = EMPTY_SHA256  # curl before 8 leaves the header out when there is no body
    if payload_hash is None:
        raise _payload_hash_missing()
    payload_form(payload_hash)
    date = request.headers.get("x-amz-date", "")
    if not _DATE.match(date):
        problem = "AWS authentication requires a valid Date or x-amz-date header"
        raise CallerError(ErrorCode.ACCESS_DENIED, problem, field="x-amz-date")
    return _claim(fields, date, payload_hash, None, malformed)


def _claim_from_query(request: S3Request) -> Claim:
    parameters = request.parameters

    def malformed(problem: str) -> CallerError:
        return CallerError(ErrorCode.AUTHORIZATION_QUERY_ERROR, problem, field="X-Amz-Credential")

    if "authorization" in request.headers:
        problem = "sign in the header or in the query, not in both"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="authorization")
    if parameters.get("X-Amz-Algorithm") == _ASYMMETRIC:
        raise _asymmetric("X-Amz-Algorithm")
    if parameters.get("X-Amz-Algorithm") != ALGORITHM:
        raise malformed(f"X-Amz-Algorithm must be {ALGORITHM}")
    names = {
        "Credential": "X-Amz-Credential",
        "SignedHeaders": "X-Amz-SignedHeaders",
        "Signature": "X-Amz-Signature",
    }
    missing = [parameter for parameter in names.values() if parameter not in parameters]
    if missing:
        raise malformed(f"{missing[0]} is missing")
    expires = parameters.get("X-Amz-Expires", "")
    if not _NUMBER.match(expires):
        raise malformed("X-Amz-Expires should be a number")
    if int(expires) < 1:
        raise malformed("X-Amz-Expires must be non-negative and more than zero seconds")
    if int(expires) > PRESIGNED_S_MAX:
        problem = f"the given X-Amz-Expires must be less than {PRESIGNED_S_MAX} seconds"
        raise malformed(f"X-Amz-Expires must be less than a week (in seconds); that is, {problem}")
    in_header, in_url = request.headers.get("x-amz-content-sha256"), parameters.get("X-Amz-Content-Sha256")
    if in_header and in_url and in_header != in_url:
        problem = "x-amz-content-sha256 is not the X-Amz-Content-Sha256 of the URL"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="x-amz-content-sha256")
    payload_hash = in_header or in_url or PayloadForm.UNSIGNED.value  # a wrong value makes only the body check fail
    fields = {name: parameters[parameter] for name, parameter in names.items()}
    return _claim(fields, parameters.get("X-Amz-Date", ""), payload_hash, int(expires), malformed)


def _claim(
    fields: dict[str, str],
    date: str,
    payload_hash: str,
    presigned_s: int | None,
    malformed: Callable[[str], CallerError],
) -> Claim:
    access_key, slash, scope = fields["Credential"].partition("/")
    if not slash or not access_key or scope.count("/") != 3:
        raise malformed("Credential must be ACCESS_KEY/DATE/REGION/s3/aws4_request")
    if not _DATE.match(date):
        raise malformed("X-Amz-Date must be given as YYYYMMDD'T'HHMMSS'Z'")
    signed_headers = tuple(fields["SignedHeaders"].split(";"))
    if list(signed_headers) != sorted(set(signed_headers)) or any(name != name.lower() for name in signed_headers):
        raise malformed("SignedHeaders must be lower-case, sorted and each named once")
    return Claim(
        access_key=access_key,
        scope=scope,
        date=date,
        signed_headers=signed_headers,
        signature=fields["Signature"],
        payload_hash=payload_hash,
        presigned_s=presigned_s,
    )


def _check_scope(claim: Claim, region: str) -> None:
    date, scope_region, service, terminator = claim.scope.split("/")
    for value, wanted, what in (
        (date, claim.date[:8], "date"),
        (scope_region, region, "region"),
        (service, "s3", "service"),
        (terminator, "aws4_request", "terminator"),
    ):
        if value != wanted:
            presigned = claim.presigned_s is not None
            raise CallerError(
                ErrorCode.AUTHORIZATION_QUERY_ERROR if presigned else ErrorCode.AUTHORIZATION_HEADER_MALFORMED,
                f"the credential scope's {what} is {value!r}, expected {wanted!r}",
                field="X-Amz-Credential" if presigned else "authorization",
            )


def _check_time(claim: Claim, now_s: float) -> None:
    try:
        signed_at = datetime.fromisoformat(claim.date).timestamp()
    except ValueError:
        raise CallerError(ErrorCode.ACCESS_DENIED, "X-Amz-Date is no valid date", field="x-amz-date") from None
    if claim.presigned_s is not None:
        if now_s < signed_at - SKEW_S:
            raise CallerError(ErrorCode.ACCESS_DENIED, "the presigned URL is not valid yet", field="X-Amz-Date")
        if now_s > signed_at + claim.presigned_s:
            raise CallerError(ErrorCode.ACCESS_DENIED, "Request has expired", field="X-Amz-Expires")
    elif abs(now_s - signed_at) > SKEW_S:
        raise CallerError(
            ErrorCode.REQUEST_TIME_TOO_SKEWED,
            "the request's date is more than 15 minutes from the server's",
            field="x-amz-date",
        )


def _check_signed_headers(request: S3Request, claim: Claim) -> None:
    signed = set(claim.signed_headers)
    unsigned = [name for name in request.headers if name.startswith("x-amz-") and name not in signed]
    if "host" not in signed:
        unsigned.append("host")
    if claim.presigned_s is not None:
        unsigned = [name for name in unsigned if name != "x-amz-content-sha256"]
    if unsigned:
        raise CallerError(ErrorCode.ACCESS_DENIED, f"the header {unsigned[0]} must be signed", field=unsigned[0])


def _payload_hash_missing() -> CallerError:
    return CallerError(
        ErrorCode.INVALID_REQUEST, f"Missing required header for this request: {PAYLOAD_HASH}", field=PAYLOAD_HASH
    )


def _unsupported(field: str = "authorization") -> CallerError:
    return CallerError(ErrorCode.INVALID_REQUEST, UNSUPPORTED, field=field)


def _asymmetric(field: str) -> CallerError:
    return CallerError(ErrorCode.NOT_IMPLEMENTED, "SigV4A signatures are not implemented", field=field)


def _encode(text: str) -> str:
    return quote(text, safe="-_.~")
