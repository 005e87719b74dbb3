"""Members of a cluster that may write into a client's memory, and must answer before it is the client's again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.headers import WRITERS_HEADER
from descriptors.messages import AgentRegistration, AgentRenewal
from nixl_client.session import agent as agents
from nixl_client.session.agent import _SharedAgent
from nixl_client.transports.buffers import as_buffer
from nixl_client.transports.transport import Transport
from tests.support.played_http import PlayedHttp


class PlayedReceiver:
    """Takes any memory. `ended` are the members that are known to have ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.offered: set[str] = set()

    def offer(self, region_id: str, buffer: Any) -> None:
        self.offered.add(region_id)

    def withdraw(self, region_id: str) -> None:
        self.offered.discard(region_id)

    def registration(self, regions: Any, lifetime_s: float) -> AgentRegistration:
        return AgentRegistration(b"", tuple(regions), lifetime_s, shm_tickets={"a.1": "t", "b.1": "t"})

    def renewal(self, regions: Any, lifetime_s: float) -> AgentRenewal:
        return AgentRenewal(lifetime_s, None, tuple(regions))

    def ended_ids(self) -> list[str]:
        return self.ended

    def call_and_connect(self, register: Any) -> Any:
        return register()

    def on_forgotten(self) -> None: ...

    def stop(self) -> None: ...


class PlayedGateway(PlayedHttp):
    """A gateway whose next answers the test sets: members that know the agent, or an error."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: Any = {"agent_id": "agent", "members": ["a.1", "b.1"]}
        self.deleted_with: list[str] = []

    def request_once(self, method: str, *_: object, headers: Mapping[str, str] | None = None, **__: object) -> Any:
        if method == "DELETE":
            self.deleted_with.append((headers or {}).get(WRITERS_HEADER, ""))
            return None
        if isinstance(self.answers, Exception):
            raise self.answers
        return SimpleNamespace(json=lambda: json.loads(json.dumps(self.answers)))

    def close(self) -> None: ...


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> PlayedReceiver:
    made = PlayedReceiver()
    monkeypatch.setattr(agents, "_make_receiver", lambda *_: made)
    return made


def registered(receiver: PlayedReceiver) -> tuple[_SharedAgent, Any, list[Any]]:
    """An agent with two buffers, known to the members a and b."""
    http: Any = PlayedGateway()
    agent = _SharedAgent(Transport.SHM, http, 60.0)
    buffers = [as_buffer(np.zeros(4096, np.uint8)) for _ in range(2)]
    for buffer in buffers:
        agent.region_of(http, buffer)
    return agent, http, buffers


def test_memory_is_released_when_every_member_has_heard_of_it(receiver: PlayedReceiver) -> None:
    agent, http, buffers = registered(receiver)
    http.answers = {"agent_id": "agent", "members": ["a.1"], "unreached": ["b.1"]}
    with pytest.raises(ServerError, match=r"b\.1"):
        agent.release(http, buffers[:1])
    assert len(receiver.offered) == 2
    receiver.ended = ["b.1"]
    agent.release(http, buffers[:1])
    assert len(receiver.offered) == 1
    agent.close(http)
    assert http.deleted_with == ["a.1"]


def test_a_member_that_left_the_cluster_must_answer_too(receiver: PlayedReceiver) -> None:
    """It may hang, and write when it goes on. The gateway does not name it any more; the client remembers it."""
    agent, http, buffers = registered(receiver)
    http.answers = {"agent_id": "agent", "members": ["a.1"]}
    with pytest.raises(ServerError, match=r"b\.1"):
        agent.release(http, buffers[:1])
    agent.close(http)
    assert http.deleted_with == ["a.1,b.1"]


def test_memory_is_not_released_because_the_others_have_forgotten_the_agent(receiver: PlayedReceiver) -> None:
    """What they have forgotten is asked of all of them again, by the id that it had."""
    agent, http, buffers = registered(receiver)
    http.answers = CallerError(ErrorCode.NO_SUCH_AGENT, "no such agent")
    with pytest.raises(ServerError, match="may still write"):
        agent.release(http, buffers[:1])
    assert len(receiver.offered) == 2
    agent.release(http, buffers[:1])
    assert http.deleted_with == ["a.1,b.1"]
    assert len(receiver.offered) == 1
    agent.close(http)


def test_members_that_have_ended_need_not_answer(receiver: PlayedReceiver) -> None:
    agent, http, buffers = registered(receiver)
    receiver.ended = ["a.1", "b.1"]
    http.answers = {"agent_id": "agent", "members": ["c.1"]}
    agent.release(http, buffers[1:])
    assert len(receiver.offered) == 1
    agent.close(http)
    assert http.deleted_with == ["c.1"]
