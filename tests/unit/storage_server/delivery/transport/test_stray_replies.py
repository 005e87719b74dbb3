"""Replies of the ucx process to commands that nobody gave."""

from __future__ import annotations

import pytest

from storage_server.delivery.transport.rules.ucx_commands import Reply
from storage_server.delivery.transport.ucx_process import STRAYS_MAX, UcxProcess


async def test_a_process_that_floods_its_server_with_replies_is_ended() -> None:
    """Each one is read on the event loop, and the process may be somebody else's by now. A few pass."""
    process = UcxProcess([], "lo", lambda: None)
    for number in range(STRAYS_MAX):
        process._end(Reply(number))
    with pytest.raises(ValueError, match="replies to no command"):
        process._end(Reply(0))
