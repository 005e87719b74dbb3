"""Presigned URLs of Signature Version 2 against the published example."""

from __future__ import annotations

from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode
from gateway.s3 import sigv2
from gateway.s3.request import parse_target

NOW = 1_175_139_000.0
EXAMPLE = (
    "/photos/puppy.jpg?AWSAccessKeyId=AKIAIOSFODNN7EXAMPLE"
    "&Signature=NpgCjnDzrM%2BWFzoENXmpNDUsSn8%3D&Expires=1175139620"
)
EXAMPLE_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
EXAMPLE_HEADERS = {"host": "johnsmith.s3.amazonaws.com"}


def example(target: str = EXAMPLE, **headers: str) -> None:
    """Verify the guide's own example, changed or not."""
    request = parse_target("GET", target, {**EXAMPLE_HEADERS, **headers}, ("s3.amazonaws.com",))
    sigv2.verify(request, sigv2.read_claim(request), EXAMPLE_SECRET, NOW)


def refusal(target: str) -> ErrorCode:
    with pytest.raises(CallerError) as refused:
        example(target)
    return refused.value.code


def test_the_published_example_verifies() -> None:
    example()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda target: target.replace("puppy", "kitten"), ErrorCode.SIGNATURE_DOES_NOT_MATCH),
        (lambda target: target.replace("1175139620", "1175139621"), ErrorCode.SIGNATURE_DOES_NOT_MATCH),
        (lambda target: target + "&versionId=1", ErrorCode.SIGNATURE_DOES_NOT_MATCH),
        (lambda target: target + "&x-amz-acl=public-read", ErrorCode.SIGNATURE_DOES_NOT_MATCH),
        (lambda target: target.replace("1175139620", "1175138999"), ErrorCode.ACCESS_DENIED),
        (lambda target: target.replace("1175139620", str(int(NOW) + 7 * 86_400 + 1)), ErrorCode.ACCESS_DENIED),
        (lambda target: target.replace("1175139620", "soon"), ErrorCode.ACCESS_DENIED),
        (lambda target: target.replace("1175139620", "9" * 400), ErrorCode.ACCESS_DENIED),
        (lambda target: target.replace("&Expires=1175139620", ""), ErrorCode.ACCESS_DENIED),
        (lambda target: target.replace("Signature=", "Other="), ErrorCode.ACCESS_DENIED),
    ],
)
def test_whatever_is_signed_cannot_be_changed(change: Any, code: ErrorCode) -> None:
    assert refusal(change(EXAMPLE)) is code


def test_what_is_not_signed_may_be_added() -> None:
    """`x-id` and the like, which newer SDKs send."""
    example(EXAMPLE + "&x-id=GetObject")
