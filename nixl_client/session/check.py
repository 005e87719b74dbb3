"""Is the server there, is it one of ours, may this key use the bucket, and is the clock right? For people who start an
engine or look for a fault. The bucket is made as a cache where it is missing and the key may.
"""

from __future__ import annotations

from dataclasses import dataclass

from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.headers import CACHE_HEADER, TRANSPORTS_PATH
from descriptors.objects import BucketCache
from nixl_client.session.signed_http import NonsenseError, SignedHttp
from nixl_client.transports.http import UnansweredError

CHECK_S = 5.0
_HINTS = {
    ErrorCode.INVALID_ACCESS_KEY_ID: "the server does not know this access key",
    ErrorCode.SIGNATURE_DOES_NOT_MATCH: "the secret key is not that of the access key",
    ErrorCode.REQUEST_TIME_TOO_SKEWED: "the clocks of this host and the server differ",
    ErrorCode.ACCESS_DENIED: "the access key may not do that",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """The finding. `text` is a sentence for people; `transports` are those besides http."""

    is_good: bool
    text: str
    was_made: bool = False
    transports: tuple[str, ...] = ()


def nobody_at(url: str, error: UnansweredError) -> str:
    """A sentence for people about a server that did not answer."""
    return error.message if error.never_sent else f"no ObjectCache at {url}: {error.message}"


def check(http: SignedHttp, bucket: str, timeout_s: float = CHECK_S) -> Checked:
    """Ask the server, once. Raises nothing: what is wrong is in the answer."""
    url = http.account.address.url
    try:
        offered = http.request_once("GET", TRANSPORTS_PATH, timeout_s=timeout_s).json()
        transports = tuple(["shm"] * bool(offered.get("shm_socket") or offered.get("shm_sockets")))
        transports += tuple(["ucx"] * bool(offered.get("ucx")))
    except NonsenseError:
        return Checked(False, f"{url} answers, but not as ObjectCache does")
    except UnansweredError as error:
        return Checked(False, nobody_at(url, error))
    except ObjectCacheError as error:
        if error.code in (ErrorCode.NO_SUCH_BUCKET, ErrorCode.INVALID_BUCKET_NAME, ErrorCode.NO_SUCH_KEY):
            return Checked(False, f"{url} is an S3 service, and no ObjectCache")
        return Checked(False, f"{url} refuses: {said(error)}")
    names = ", ".join((*transports, "http"))
    try:
        http.request_once("GET", f"/{bucket}", {"location": ""}, timeout_s=timeout_s)
        return Checked(True, f"{url}: ok, bucket {bucket}; it offers {names}", transports=transports)
    except ObjectCacheError as error:
        if error.code is not ErrorCode.NO_SUCH_BUCKET:
            return Checked(False, f"{url}, bucket {bucket}: {said(error)}", transports=transports)
    try:
        make_cache(http, bucket, BucketCache(), timeout_s)
    except ObjectCacheError as error:
        problem = f"{url}: there is no bucket {bucket}, and it cannot be made: {said(error)}"
        return Checked(False, problem, transports=transports)
    return Checked(True, f"{url}: ok, made the bucket {bucket} as a cache; it offers {names}", True, transports)


def make_cache(http: SignedHttp, bucket: str, cache: BucketCache, timeout_s: float = CHECK_S) -> None:
    """Create a bucket as a cache; one that is the caller's own already stays as it is. Raises ObjectCacheError."""
    try:
        http.request_once("PUT", f"/{bucket}", timeout_s=timeout_s, headers={CACHE_HEADER: cache.text()})
    except ObjectCacheError as error:
        if error.code is not ErrorCode.BUCKET_ALREADY_OWNED:
            raise


def said(error: ObjectCacheError) -> str:
    """The error for people, with what is likely meant."""
    hint = _HINTS.get(error.code)
    return f"{error.code.value}: {error.message}" + (f" ({hint})" if hint else "")
