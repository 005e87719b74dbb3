"""Commands to the ucx process and its replies, as lines."""

from __future__ import annotations

import pytest

from objectcache.adapters.nixl_memory import Memory
from storage_server.delivery.transport.rules.ucx_commands import (
    REPLY_BYTES_MAX,
    AddPeer,
    Command,
    EndFlight,
    Notify,
    Read,
    RemovePeer,
    Reply,
    WriteGroup,
    WriteSpans,
    decode_command,
    decode_reply,
    encode_command,
    encode_reply,
)
from storage_server.planning.area_span import AreaSpan, area_spans

MEMORY = Memory(2**63, 100, "cuda:1")
COMMANDS: list[Command] = [
    AddPeer("name", b"\0\xff meta", (MEMORY, Memory(0, 1))),
    RemovePeer("name"),
    Notify("name", b"\0notice"),
    WriteSpans(
        "name", (AreaSpan(0, 4096, 10), AreaSpan(1, 0, 2**40)), (MEMORY, MEMORY), WriteGroup(3, 4, True, b"\x01")
    ),
    WriteSpans("name", (AreaSpan(0, 0, 1),), (MEMORY,)),
    Read("name", (MEMORY, MEMORY), AreaSpan(0, 1, 2)),
    EndFlight(7),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_are_read_as_they_were_written(command: Command) -> None:
    line = encode_command(5, command)
    assert line.count(b"\n") == 1
    assert decode_command(line) == (5, command)


@pytest.mark.parametrize("reply", [Reply(1), Reply(2, 10), Reply(3, 0, "why\n", True)])
def test_replies_are_read_as_they_were_written(reply: Reply) -> None:
    assert decode_reply(encode_reply(reply)) == reply


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"x",
        b"{}",
        b"[]",
        b"[1]",
        b'["1",0,null,false]',
        b"[1,0,null,0]",
        b"[true,0,null,false]",
        b"[" * (REPLY_BYTES_MAX - 1),
    ],
    ids=lambda line: line[:40].decode(),
)
def test_what_is_no_reply_is_refused(line: bytes) -> None:
    """The process may be somebody else's by now."""
    with pytest.raises(ValueError, match=r"."):
        decode_reply(line)


def test_only_shared_memory_can_be_named() -> None:
    areas = [(1000, 100), (5000, 50)]
    assert area_spans(areas, [(1000, 100), (5010, 40)]) == (AreaSpan(0, 0, 100), AreaSpan(1, 10, 40))
    for outside in ((999, 1), (1000, 101), (5000, 51), (3000, 1)):
        with pytest.raises(ValueError, match="not shared"):
            area_spans(areas, [outside])
