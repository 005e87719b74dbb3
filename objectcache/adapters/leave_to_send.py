"""`Expect: 100-continue`: a client that sends this header holds its body back until the server gives it leave."""

from __future__ import annotations

from aiohttp import web

_CONTINUED = web.RequestKey("continued", bool)


def is_held_back(http: web.BaseRequest) -> bool:
    """Whether the client waits for leave to send its body."""
    return http.headers.get("Expect", "").lower() == "100-continue" and _CONTINUED not in http


async def give_leave(http: web.BaseRequest) -> None:
    """Tell a client that waits for it to send its body. Call this when the request is otherwise acceptable."""
    if is_held_back(http):
        http[_CONTINUED] = True
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # the answer proper has not begun
