"""The bytes of header values, and the comparison of secrets in them. Pure.

aiohttp decodes header values as UTF-8, and bytes that are none as surrogates, which `str.encode` refuses.
"""

from __future__ import annotations

import hmac


def header_bytes(text: str) -> bytes:
    """The bytes of a header value as they came."""
    return text.encode(errors="surrogateescape")


def is_secret(said: str, *secrets: str) -> bool:
    """Whether a header value is one of the secrets. The time does not depend on what was said."""
    given = header_bytes(said)
    found = [hmac.compare_digest(given, secret.encode()) for secret in secrets]
    return any(found)
