"""Whether a service may be asked, by how it has failed. Pure: time is an argument.

A service may be too busy for one bucket, and a proxy before it may fail at one object, which a tenant may have made. So
what one caller meets in one bucket has this caller leave this bucket alone, and nobody else. Only a service that nobody
can connect to is left alone by all.

    503 for bucket a, five times, to caller A   ->  A waits where it asks for bucket a; B, and A in bucket b, do not
    no connection, five times                   ->  all wait; then a request of the server's own tries to connect
"""

from __future__ import annotations

from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from objectcache.adapters.breaker import Breaker, Breakers
from storage_server.home.rules.refusals import NoConnectionError

SCOPES_MAX = 4_096
"""So many callers and buckets that meet failures are remembered."""
Scope = tuple[str, str]
"""A caller, and the bucket that it asks for; an empty one for the service itself."""


def scope_of(caller: str, target: str) -> Scope:
    """The scope of a request for this path and query."""
    return caller, target.partition("?")[0].removeprefix("/").partition("/")[0]


class ServiceHealth:
    """One service. Before each request `wait_s` is asked, and then `answered`, `failed` or `gave_up` is told."""

    def __init__(self, failures_max: int, pause_s_min: float, pause_s_max: float) -> None:
        self._connections = Breaker(failures_max, pause_s_min, pause_s_max)
        self._scopes = Breakers[Scope](failures_max, pause_s_min, pause_s_max, SCOPES_MAX)

    def failure_count(self, scope: Scope) -> int:
        """The failures of a scope since its last success."""
        breaker = self._scopes.failing(scope)
        return 0 if breaker is None else breaker.failure_count

    @property
    def has_to_connect(self) -> bool:
        """Whether somebody has to try whether the service can be connected to."""
        return self._connections.is_trying

    def is_trying(self, scope: Scope) -> bool:
        """Whether a request has gone after a pause of this scope, and has not ended."""
        breaker = self._scopes.failing(scope)
        return breaker is not None and breaker.is_trying

    def wait_s(self, scope: Scope, now_s: float) -> float:
        """How long a request must wait; 0 where it may go now. Where `has_to_connect` then, a request whose end no
        caller decides goes before it, and likewise where `is_trying`, if it has a body of a caller.
        """
        wait_s = self._scopes.wait_s(scope, now_s)
        if wait_s:
            return wait_s
        wait_s = self._connections.wait_s(now_s)
        if wait_s:
            self._scopes.gave_up(scope)
        return wait_s

    def answered(self, scope: Scope) -> None:
        """Note an answer, be it a refusal."""
        self._connections.succeeded()
        self._scopes.succeeded(scope)

    def failed(self, scope: Scope, error: ObjectCacheError, now_s: float) -> None:
        """Note an error. A refusal is an answer, and so is a wrong one, or one that the service failed at."""
        if isinstance(error, NoConnectionError):
            self._connections.failed(now_s)
            self._scopes.gave_up(scope)
        elif isinstance(error, ServerError) and error.code is ErrorCode.SLOW_DOWN:
            self._connections.succeeded()
            self._scopes.failed(scope, now_s)
        else:
            self.answered(scope)

    def gave_up(self, scope: Scope) -> None:
        """Note that a request ended without telling anything of the service, because its caller left."""
        self._scopes.gave_up(scope)

    def connected(self) -> None:
        """Note that the service can be connected to."""
        self._connections.succeeded()

    def gave_up_connecting(self) -> None:
        """Note that nobody tries to connect any more."""
        self._connections.gave_up()
