"""One line for each finished request, at INFO on the logger `objectcache.requests`."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from descriptors.tracing import ServerTiming

NAME_CHARACTERS_MAX = 128
"""The most characters of a bucket or key in a line, so that every line stays below 4 KiB."""
CLIENT_GONE = "ClientGone"
"""The code where the connection ended before the answer was complete; the client may have every byte all the same."""
_log = logging.getLogger("objectcache.requests")


@dataclass(frozen=True, slots=True)
class RequestLine:
    """The log line of a request. `by` is its access key. `status` is that of the answer, 0 where there was none. `code`
    is the error's, or CLIENT_GONE. `nbytes` of objects or chunks were moved. `bucket` and `key` are as the client sent
    them.
    """

    by: str
    request_id: str
    operation: str
    status: int
    nbytes: int
    timing: ServerTiming
    trace_id: str = ""
    bucket: str = ""
    key: str = ""
    code: str = ""


def logs_requests() -> bool:
    """Whether request lines are logged; otherwise the caller need not collect their fields."""
    return _log.isEnabledFor(logging.INFO)


def log_request(line: RequestLine) -> None:
    """Write the line: `name=value`, text from outside as JSON strings in ASCII."""
    words = [f"by={line.by}", f"request={line.request_id or '-'}"]
    if line.trace_id:
        words.append(f"trace={line.trace_id}")
    words += [f"operation={line.operation}", f"status={line.status}"]
    if line.code:
        words.append(f"code={line.code}")
    words.append(f"bytes={line.nbytes}")
    timing = line.timing
    times = {"gateway": timing.gateway_s, "storage": timing.storage_s, "transfer": timing.transfer_s}
    words += [f"{name}_ms={1e3 * value:.3f}" for name, value in times.items()]
    words += [f"{name}={_quoted(text)}" for name, text in (("bucket", line.bucket), ("key", line.key)) if text]
    _log.info("%s", " ".join(words))


def _quoted(text: str) -> str:
    """The text as a JSON string, which cannot end the line or the value. A text that is too long is cut, and marked."""
    whole = len(text) <= NAME_CHARACTERS_MAX
    return json.dumps(text if whole else f"{text[:NAME_CHARACTERS_MAX]}...")
