"""HMAC between a gateway and a storage server that run apart.

The signature covers the operation, its arguments (which name access key and bucket), the body's SHA-256 or
UNSIGNED-PAYLOAD where the body is streamed, and an expiry in Unix seconds. Pure: the caller supplies the time.
"""

from __future__ import annotations

import hashlib
import hmac

from descriptors.header_bytes import header_bytes, is_secret

AUTH_HEADER = "x-objectcache-peer-auth"
CALL_HEADER = "x-objectcache-call"
STREAMED_BODY = "UNSIGNED-PAYLOAD"
LIFETIME_S = 60


class PeerSecrets:
    """The secrets that gateways and storage servers share. The first one signs, and each of them is accepted, so that a
    secret can be replaced without a restart: add the new one behind the old one everywhere, then put it first
    everywhere, then take the old one away.
    """

    def __init__(self, *values: bytes) -> None:
        if not values:
            raise ValueError("a secret is needed")
        self._values = values

    @property
    def signing(self) -> bytes:
        """The secret that signs."""
        return self._values[0]

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """Every secret that counts."""
        return self._values

    def become(self, others: PeerSecrets) -> None:
        """These count from now on."""
        self._values = others.accepted


def sign_call(secret: bytes, operation: str, call: str, body_sha256: str, now_s: float) -> str:
    """The header value a gateway sends: version, expiry, body hash, signature."""
    expires_at = int(now_s) + LIFETIME_S
    return f"v1 {expires_at} {body_sha256} {_signature(secret, operation, call, body_sha256, expires_at)}"


def check_call(secrets: PeerSecrets, header: str, operation: str, call: str, now_s: float) -> str | None:
    """The body hash the header vouches for, or None when the header is malformed, expired or not ours."""
    parts = header.split(" ")
    if len(parts) != 4 or parts[0] != "v1" or not parts[1].isascii() or not parts[1].isdigit():
        return None
    expires_at, body_sha256, signature = int(parts[1][:15]), parts[2], parts[3]
    if not now_s <= expires_at <= now_s + 2 * LIFETIME_S:
        return None
    expected = [_signature(each, operation, call, body_sha256, expires_at) for each in secrets.accepted]
    return body_sha256 if is_secret(signature, *expected) else None


def _signature(secret: bytes, operation: str, call: str, body_sha256: str, expires_at: int) -> str:
    text = "\n".join(("objectcache-v1", operation, call, body_sha256, str(expires_at)))
    return hmac.new(secret, header_bytes(text), hashlib.sha256).hexdigest()
