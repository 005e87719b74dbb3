"""Lines of the log of requests."""

from __future__ import annotations

import logging

import pytest

from descriptors.tracing import (
    ServerTiming,
)
from objectcache.adapters.request_log import RequestLine, log_request, logs_requests


def test_a_line_is_bounded_and_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert logging.getLogger("objectcache.requests").level == logging.NOTSET
    caplog.set_level(logging.WARNING)
    assert not logs_requests(), "objectcache logs warnings unless told otherwise"
    caplog.set_level(logging.INFO, "objectcache.requests")
    wide = "\U0001f600" * 5000
    line = RequestLine(
        "gateway", "r" * 64, "put_object", 200, 1 << 62, ServerTiming(1e6, 1e6, 1e6), "t" * 16, wide, wide
    )
    log_request(line)
    assert len(caplog.records[-1].getMessage()) < 4096
