"""Access keys and their rights. Pure values and decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from descriptors.errors import CallerError, ErrorCode


@dataclass(frozen=True, slots=True)
class Credential:
    """One access key. `buckets` and `actions` are shell patterns; actions are named as in S3 policies (GetObject)."""

    access_key: str
    secret_key: str = field(repr=False)
    buckets: tuple[str, ...] = ("*",)
    actions: tuple[str, ...] = ("*",)

    def allows(self, action: str, bucket: str) -> bool:
        """Whether this key may do `action` in `bucket` ("" for requests outside any bucket)."""
        in_bucket = not bucket or any(fnmatchcase(bucket, pattern) for pattern in self.buckets)
        return in_bucket and any(fnmatchcase(action, pattern) for pattern in self.actions)


NOBODY = Credential("", "", buckets=(), actions=())
"""A key that may do nothing."""


class CredentialBook:
    """All credentials of a gateway by access key."""

    def __init__(self, credentials: Iterable[Credential]) -> None:
        self._by_key = {credential.access_key: credential for credential in credentials}

    def become(self, credentials: Iterable[Credential]) -> None:
        """These credentials count from now on, and no others. Requests under way go on."""
        self._by_key = {credential.access_key: credential for credential in credentials}

    def find(self, access_key: str) -> Credential:
        """The credential of an access key. Raises CallerError(InvalidAccessKeyId)."""
        credential = self._by_key.get(access_key)
        if credential is None:
            raise CallerError(
                ErrorCode.INVALID_ACCESS_KEY_ID, "the access key is not known here", field="AWSAccessKeyId"
            )
        return credential


def authorize(credential: Credential, action: str, bucket: str) -> None:
    """Raises CallerError(AccessDenied) when the key may not do this."""
    if not credential.allows(action, bucket):
        raise CallerError(ErrorCode.ACCESS_DENIED, f"this access key may not {action} in {bucket or 'this service'}")


def require_all_buckets(credential: Credential, action: str) -> None:
    """Raises CallerError(AccessDenied) for a key that is limited to some buckets, as the action tells
    of all buckets.
    """
    if "*" not in credential.buckets:
        raise CallerError(ErrorCode.ACCESS_DENIED, f"a key that is limited to some buckets may not {action}")
