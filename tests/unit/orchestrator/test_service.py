"""The parts of an orchestrator, joined."""

from __future__ import annotations

from objectcache.orchestrator.service import Orchestrator
from objectcache.orchestrator.settings import OrchestratorSettings

ENGINES_KEEP_S = 5.0
"""So long vLLM and SGLang (uvicorn) and llama.cpp (cpp-httplib) keep an idle connection by default."""


async def test_idle_connections_are_given_up_before_engines_end_them() -> None:
    """A request that was sent while its engine ended the connection got 502 where there was no other engine."""
    made = Orchestrator(OrchestratorSettings(admin_token="a-token-of-sixteen-letters"))
    for session in (made._http, made._probing):
        assert session.connector is not None
        assert session.connector._keepalive_timeout < ENGINES_KEEP_S
    await made.stop()
