"""Lines of the log of requests."""

from __future__ import annotations

import json
import logging

import pytest

from descriptors.tracing import (
    ServerTiming,
)
from objectcache.adapters.request_log import RequestLine, log_request, logs_requests
from objectcache.cli.log_format import JsonLines


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


def test_a_line_says_who_asked_and_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "objectcache.requests")
    line = RequestLine(
        "gateway", "r", "lookup", 200, 0, ServerTiming(0.001, 0.0, 0.0), "t", "b", "", "", "127.0.0.1", 'KEY"\n',
        {"chunks": 4, "matched": 3},
    )  # fmt: skip
    log_request(line)
    text = caplog.records[-1].getMessage()
    assert "gateway_ms=1.000" in text
    assert text.endswith(r'chunks=4 matched=3 client="127.0.0.1" access_key="KEY\"\n" bucket="b"')
    said = json.loads(JsonLines().format(caplog.records[-1]))
    assert (said["logger"], said["level"], said["matched"], said["access_key"]) == (
        "objectcache.requests", "info", 3, 'KEY"\n'
    )  # fmt: skip
    assert "message" not in said


def test_a_line_of_json_has_its_error(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("wrong\nagain")
    except ValueError:
        logging.getLogger("x").exception("it %s", "failed")
    text = JsonLines().format(caplog.records[-1])
    said = json.loads(text)
    assert "\n" not in text
    assert (said["message"], said["level"]) == ("it failed", "error")
    assert said["error"].endswith("ValueError: wrong\nagain")
    assert said["time"].endswith("+00:00")
