"""Access: the tenant of a request, operators, and the keys that go on to engines."""

from __future__ import annotations

from aiohttp import web

from descriptors.header_bytes import is_secret
from objectcache.adapters.caller import caller_of
from objectcache.orchestrator.answers import Refusal
from objectcache.orchestrator.orders import Orders
from objectcache.orchestrator.rules.admission import Tenant
from objectcache.orchestrator.rules.forwarded_headers import forwarded_headers
from objectcache.orchestrator.settings import OrchestratorSettings

ANYBODY = Tenant("")
OPERATORS = "/_orchestrator"
"""The caller whose memory operators use. No address is named so."""


class Access:
    """Reads the keys of requests. `engine_key` is the API key that engines ask for."""

    def __init__(self, settings: OrchestratorSettings, orders: Orders, engine_key: str | None) -> None:
        self._settings = settings
        self._orders = orders
        self._engine_key = engine_key

    def tenant(self, http: web.BaseRequest) -> Tenant:
        """The tenant of a request, by its API key. Raises Refusal."""
        tenants = self._settings.tenants
        if not tenants:
            return ANYBODY
        key = _bearer(http)
        tenant = tenants.get(key) if key else None
        if tenant is None:
            raise Refusal(401, "the API key is missing, or not known", code="invalid_api_key")
        return self._orders.tenant(tenant)

    def caller(self, http: web.BaseRequest) -> str:
        """The name under which memory counts: the tenant, or where there are none the address. Raises Refusal."""
        return self.tenant(http).name or caller_of(http.remote or "")

    def require_admin(self, http: web.BaseRequest) -> None:
        """An operator has the token. A peer on this host proves nothing: a proxy there brings the whole world. Raises
        Refusal.
        """
        if not is_secret(_bearer(http), self._settings.admin_token):
            raise Refusal(401, "/_orchestrator needs the admin token (OBJECTCACHE_ADMIN_TOKEN) as a bearer token")

    def forwarded(self, http: web.BaseRequest, request_id: str) -> dict[str, str]:
        """The headers that engines get. An operator's token goes to no engine: whoever has it decides about all of
        them.
        """
        key = f"Bearer {self._engine_key}" if self._engine_key is not None else None
        if self._sends_keys_on and not is_secret(_bearer(http), self._settings.admin_token):
            key = http.headers.get("Authorization")
        return forwarded_headers(http.headers, request_id, key)

    @property
    def _sends_keys_on(self) -> bool:
        """Whether engines get the key of a client: not where it is a tenant's at this orchestrator, with which an
        engine could ask for all that is that tenant's.
        """
        return self._engine_key is None and not self._settings.tenants


def _bearer(http: web.BaseRequest) -> str:
    kind, _, key = http.headers.get("Authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""
