"""The orders of operators: pins, which send prompts that begin in some way to one engine, and the quotas of tenants.
They are kept in the registry, which tells all orchestrators, else in the own file.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from descriptors.objects import TIME_S_MAX
from objectcache.adapters.rare_warnings import RareWarnings
from objectcache.orchestrator.gate import Gate
from objectcache.orchestrator.registry import Document, EtcdRegistry
from objectcache.orchestrator.router import Pin
from objectcache.orchestrator.rules.admission import Tenant
from objectcache.orchestrator.writing import Writing

PINS_MAX = 10_000
PAST_S = 60.0
"""Clocks differ: a pin is over for every orchestrator so long after its end."""
PAST_AT_ONCE = 64
_log = logging.getLogger(__name__)


class Orders:
    """The orders that one orchestrator follows. `engines` are those that it knows, by name; the shares of `tenants` are
    those of the settings. Used on its event loop.
    """

    def __init__(
        self,
        engines: Collection[str],
        tenants: Collection[Tenant],
        gate: Gate,
        writing: Writing | None,
        registry: EtcdRegistry | None,
    ) -> None:
        """Takes over what the file has. A quota that cannot be read here, since another release has written it, stays
        there and does not count.
        """
        self._engines = engines
        self._tenants = tenants
        self._gate = gate
        self._writing = writing
        self._registry = registry
        self._warnings = RareWarnings(_log)
        self.pins: dict[str, Pin] = {}
        self._quotas: dict[str, Tenant] = {}
        if writing is not None:
            for name, text in writing.metadata.quotas().items():
                try:
                    self._quotas[name] = tenant_of(name, json.loads(text))
                except (ValueError, RecursionError) as error:
                    _log.warning("the quota of %s in the metadata does not count: %s", name, error)
            self.pins = {prefix: Pin(*each) for prefix, each in writing.metadata.pins().items()}

    def tenant(self, tenant: Tenant) -> Tenant:
        """The tenant with the quota that was set for it since."""
        return self._quotas.get(tenant.name, tenant)

    async def set_quota(self, name: str, document: Mapping[str, Any]) -> None:
        """Give a tenant another share, for good where there is a place for metadata. Raises ValueError,
        MetadataError.
        """
        if all(tenant.name != name for tenant in self._tenants):
            raise ValueError(f"there is no tenant {name}")
        tenant = tenant_of(name, document)
        if self._registry is not None:
            await self._registry.set_quota(name, document)
        elif self._writing is not None:
            await self._writing.set_quota(name, document)
        self._quotas[name] = tenant
        self._gate.set_share(tenant)

    async def pin(self, prefix: str, document: Mapping[str, Any] | None) -> None:
        """Send prompts whose first block has this name to an engine; None: do so no more. Raises ValueError,
        MetadataError.
        """
        if len(prefix) != 32 or not set(prefix) <= set("0123456789abcdef"):
            raise ValueError("a prefix is the 32 hex digits of a prompt's first block")
        pin = None
        if document is not None:
            pin = self._pin_of(document)
            if len(self.pins) >= PINS_MAX and prefix not in self.pins:
                await self._forget_past()
            if len(self.pins) >= PINS_MAX and prefix not in self.pins:
                raise ValueError(f"there are {PINS_MAX} pins already")
        if self._registry is not None:
            await self._registry.pin(prefix, None if pin is None else {"engine": pin.engine, "until": pin.until})
        if self._writing is not None and (self._registry is None or pin is None):  # one that is over is over here, too
            await self._writing.pin(prefix, None if pin is None else pin.engine, None if pin is None else pin.until)
        if pin is None:
            self.pins.pop(prefix, None)
        else:
            self.pins[prefix] = pin

    async def _forget_past(self) -> None:
        """Take some pins away whose time is over, where there is no room: nobody else does. With room, a wrong clock
        takes nothing away that still counts for other orchestrators. Raises MetadataError.
        """
        now = time.time()
        past = [prefix for prefix, pin in self.pins.items() if pin.until is not None and pin.until < now - PAST_S]
        for prefix in past[:PAST_AT_ONCE]:
            if self._registry is not None:
                await self._registry.pin(prefix, None)
            if self._writing is not None:
                await self._writing.pin(prefix, None, None)
            self.pins.pop(prefix, None)

    def follow_pins(self, changed: Mapping[str, Document | None]) -> None:
        """Pins of the registry. One to an engine that is not known here counts when the engine joins."""
        for prefix, document in changed.items():
            engine, until = (None, None) if document is None else (document.get("engine"), document.get("until"))
            has_room = prefix in self.pins or len(self.pins) < PINS_MAX
            if isinstance(engine, str) and isinstance(until, int | float | None) and has_room:
                self.pins[prefix] = Pin(engine, until)
            else:
                self.pins.pop(prefix, None)

    def follow_quotas(self, changed: Mapping[str, Document | None]) -> None:
        """Shares of the registry; a tenant without one has that of the settings."""
        for name, document in changed.items():
            share = next((each for each in self._tenants if each.name == name), None)
            if share is None:
                continue
            self._quotas.pop(name, None)
            if document is not None:
                try:
                    share = self._quotas[name] = tenant_of(name, document)
                except ValueError as error:
                    self._warnings.warn("a quota in the registry does not count, of %.300r: %.300r", name, str(error))
            self._gate.set_share(share)

    def _pin_of(self, document: Mapping[str, Any]) -> Pin:
        """Raises ValueError."""
        engine, until = document.get("engine"), document.get("until")
        is_time = until is None or (
            isinstance(until, int | float) and not isinstance(until, bool) and 0 <= until <= TIME_S_MAX
        )
        if not isinstance(engine, str) or engine not in self._engines or not is_time:
            raise ValueError("engine must be an engine's name, until a Unix time or null")
        return Pin(engine, until)


def tenant_of(name: str, document: Mapping[str, Any]) -> Tenant:
    """A tenant's share by JSON: `weight`, `priority`, `active_max`. Raises ValueError."""
    if not isinstance(document, Mapping):
        raise ValueError("a quota must be a JSON object")
    if unknown := set(document) - {"weight", "priority", "active_max"}:
        raise ValueError(f"{', '.join(sorted(unknown))}: not known; a quota has weight, priority, active_max")
    weight, priority, active_max = (document.get(key) for key in ("weight", "priority", "active_max"))
    if weight is not None and (not isinstance(weight, int | float) or not 0.001 <= weight <= 1000):
        raise ValueError("weight must be from 0.001 to 1000")
    if priority is not None and (type(priority) is not int or not -100 <= priority <= 100):
        raise ValueError("priority must be a whole number from -100 to 100")
    if active_max is not None and (type(active_max) is not int or active_max < 1):
        raise ValueError("active_max must be at least 1")
    return Tenant(name, 1.0 if weight is None else float(weight), priority or 0, active_max)
