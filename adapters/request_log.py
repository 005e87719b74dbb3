"""One line for each finished request, at INFO on the logger `objectcache.requests`; and the clock for its times."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass

from descriptors.tracing import ServerTiming

NAME_CHARACTERS_MAX = 128
"""Of a bucket or key: a line stays below 4 KiB whatever is asked for."""
CLIENT_GONE = "ClientGone"
"""The code where the connection ended before we were done; every byte may have been taken all the same."""
_log = logging.getLogger("objectcache.requests")


class Stopwatch:
    """Time spent in `with` blocks that follow, and do not contain, each other."""

    __slots__ = ("_began_s", "_total_s")

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._total_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._began_s is not None:
            self._total_s += time.perf_counter() - self._began_s
            self._began_s = None

    def add(self, elapsed_s: float) -> None:
        """Time somebody else has measured."""
        self._total_s += elapsed_s

    @property
    def total_s(self) -> float:
        """All of it until now, a block that has not ended included."""
        running_s = 0.0 if self._began_s is None else time.perf_counter() - self._began_s
        return self._total_s + running_s


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What is logged of a request: `by` whom; `status` as answered, 0 where it was not; `code` of the error, or
    CLIENT_GONE; `nbytes` of objects or chunks moved. `bucket` and `key` may be anything a client sends.
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
    """Whether lines are wanted: what only they need is not worked out otherwise."""
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
    """Nothing in it can end the line or the value; what is too long is cut, and says so."""
    whole = len(text) <= NAME_CHARACTERS_MAX
    return json.dumps(text if whole else f"{text[:NAME_CHARACTERS_MAX]}...")
