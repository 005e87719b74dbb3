"""One line for each finished request, at INFO on the logger `objectcache.requests`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from descriptors.tracing import ServerTiming

NAME_CHARACTERS_MAX = 128
"""The most characters of a bucket or key in a line, so that every line stays below 4 KiB."""
CLIENT_GONE = "ClientGone"
"""The code where the connection ended before the answer was complete; the client may have every byte all the same."""
OUTSIDE = frozenset({"client", "access_key", "bucket", "key"})
"""Texts that come from outside."""
_log = logging.getLogger("objectcache.requests")


@dataclass(frozen=True, slots=True)
class RequestLine:
    """The log line of a request. `by` is the process's part, gateway or storage. `status` is that of the answer, 0
    where there was none. `code` is the error's, or CLIENT_GONE. `nbytes` of objects or chunks were moved. `bucket` and
    `key` are as the client sent them, `client` is its address. `facts` are what the operation adds.
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
    client: str = ""
    access_key: str = ""
    facts: Mapping[str, str | int] = field(default_factory=dict)

    def fields(self) -> dict[str, str | int | float]:
        """Everything that is known, by name; times in milliseconds."""
        found: dict[str, str | int | float] = {"by": self.by, "request": self.request_id or "-"}
        if self.trace_id:
            found["trace"] = self.trace_id
        found |= {"operation": self.operation, "status": self.status}
        if self.code:
            found["code"] = self.code
        found["bytes"] = self.nbytes
        timing = self.timing
        times = {"gateway": timing.gateway_s, "storage": timing.storage_s, "transfer": timing.transfer_s}
        found |= {f"{name}_ms": round(1e3 * value, 3) for name, value in times.items()}
        found |= self.facts
        outside = {"client": self.client, "access_key": self.access_key, "bucket": self.bucket, "key": self.key}
        return found | {name: text for name, text in outside.items() if text}


def logs_requests() -> bool:
    """Whether request lines are logged; otherwise the caller need not collect their fields."""
    return _log.isEnabledFor(logging.INFO)


def log_request(line: RequestLine) -> None:
    """Write the line: `name=value`, text from outside as JSON strings in ASCII. The record also has the fields as they
    are (`log_format.JsonLines`), with texts cut alike.
    """
    fields = {name: _cut(value) if name in OUTSIDE else value for name, value in line.fields().items()}
    words = [
        f"{name}={json.dumps(value) if name in OUTSIDE else f'{value:.3f}' if isinstance(value, float) else value}"
        for name, value in fields.items()
    ]
    _log.info("%s", " ".join(words), extra={"fields": fields})


def _cut(value: str | int | float) -> str:
    """A text that is too long is cut, and marked."""
    text = str(value)
    return text if len(text) <= NAME_CHARACTERS_MAX else f"{text[:NAME_CHARACTERS_MAX]}..."
