"""The requests of the orchestrator itself to one engine: probes, and documents of bounded size."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from objectcache.adapters.whole_answers import read_whole
from objectcache.orchestrator.sayings import Sayings

FIRST_TOKEN_S = 20.0
ANSWER_BYTES_MAX = 1 << 18
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Illness:
    """Why an engine is not well. Where it refused the connection, no process listens there any more."""

    error: str
    is_refused: bool = False


class EngineCalls:
    """Requests of the orchestrator's own to one engine. No answer is believed to be short, quick or right."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        timeout_s: float,
        headers: Mapping[str, str] | None,
        sayings: Sayings,
    ) -> None:
        """`headers` go with every request. Answers are read in the turns of `sayings`."""
        self._sayings = sayings
        self._http = http
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._first_timeout = aiohttp.ClientTimeout(total=FIRST_TOKEN_S)
        self._headers = dict(headers or {})

    async def illness(self) -> Illness | None:
        """One probe; None for an engine that is well."""
        try:
            async with self._http.get(
                f"{self._url}/health", timeout=self._timeout, headers=self._headers, allow_redirects=False
            ) as answer:
                return None if answer.status == 200 else Illness(f"/health answers {answer.status}")
        except aiohttp.ClientConnectorError as failure:
            return Illness(str(failure), isinstance(failure.os_error, ConnectionRefusedError))
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            return Illness(f"/health: {type(failure).__name__} {failure}")

    async def read(self, path: str, bytes_max: int, reading: Callable[[bytes], _T]) -> _T | None:
        """The answer to a GET, as `reading` reads it; None where there is none, or one that is too long. Raises what
        `reading` raises.
        """
        try:
            async with self._http.get(
                f"{self._url}{path}", timeout=self._timeout, headers=self._headers, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    return None
                said = await read_whole(answer, bytes_max)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        return await self._sayings.read(self._url, said, reading)

    async def json(self, path: str, reading: Callable[[Any], _T]) -> _T | None:
        """The JSON document at a path, as `reading` reads it; None where there is none, or one that is too long."""
        with contextlib.suppress(ValueError, RecursionError):
            return await self.read(path, ANSWER_BYTES_MAX, lambda said: reading(json.loads(said)))
        return None

    async def compute_token(self, model: str) -> None:
        """Have one token computed. Raises aiohttp.ClientError, TimeoutError, OSError."""
        async with self._http.post(
            f"{self._url}/v1/completions",
            json={"model": model, "prompt": [1], "max_tokens": 1},
            timeout=self._first_timeout,
            headers=self._headers,
            allow_redirects=False,
        ) as answer:
            await read_whole(answer, ANSWER_BYTES_MAX)
