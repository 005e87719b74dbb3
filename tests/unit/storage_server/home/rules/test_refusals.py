"""What a service's refusals become, whatever it writes into them."""

from __future__ import annotations

import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from storage_server.home.rules.refusals import ELEMENTS_MAX, refusal

BUSY = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"


@pytest.mark.parametrize(
    ("said", "wait_s"),
    [(None, None), ("7", 7), ("9" * 6, 999_999), ("9" * 7, None), ("9" * 5_000, None), ("-1", None), ("soon", None)],
)
def test_a_pause_has_few_digits(said: str | None, wait_s: int | None) -> None:
    """Python raises ValueError for a number of 5,000 digits."""
    error = refusal(503, BUSY, said)
    assert isinstance(error, ServerError)
    assert (error.code, error.retryable, error.retry_after_s) == (ErrorCode.SLOW_DOWN, True, wait_s)


def test_a_refusal_has_the_words_of_the_service() -> None:
    document = b'<Error xmlns="urn:x"><Code>NoSuchBucket</Code><Message>none</Message></Error>'
    error = refusal(404, document)
    assert isinstance(error, CallerError)
    assert (error.code, error.message) == (ErrorCode.NO_SUCH_BUCKET, "none")


def test_a_refusal_has_few_words_of_the_service() -> None:
    long = b"x" * 5_000
    error = refusal(
        400, b"<Error><Code>%b</Code><Message>%b</Message><ArgumentName>%b</ArgumentName></Error>" % ((long,) * 3)
    )
    assert len(error.message) + len(error.field or "") < 1_500


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"gone",
        b"<Error>" + b"<a/>" * ELEMENTS_MAX + b"</Error>",
        b"<!DOCTYPE Error><Error/>",
        b"<a>" * 1_000,
        b"\xff\xfe<\0E\0",
    ],
)
def test_what_is_no_document_of_an_error_counts_by_its_status(document: bytes) -> None:
    assert refusal(404, document).code is ErrorCode.NO_SUCH_KEY
