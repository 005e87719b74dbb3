"""Which engine keeps which response: a request that goes on from one must go there. Pure."""

from __future__ import annotations

import re
from collections import OrderedDict

KEPT_MAX = 100_000
ID_CHARACTERS_MAX = 128
LOOKED_AT_BYTES = 4096
_ID = re.compile(rb'"id"\s*:\s*"(resp[A-Za-z0-9_-]{1,124})"')


def response_id(beginning: bytes) -> str:
    """The id of a response, at the beginning of an answer or of a stream of events; "" where there is none."""
    found = _ID.search(beginning[:LOOKED_AT_BYTES])
    return "" if found is None else found[1].decode()


class KeptResponses:
    """The engines of the last KEPT_MAX responses, by tenant and id: no tenant may ask for those of others."""

    def __init__(self) -> None:
        self._engines: OrderedDict[tuple[str, str], str] = OrderedDict()

    def note(self, tenant: str, response: str, engine: str) -> None:
        """This engine has given a response."""
        self._engines[tenant, response] = engine
        self._engines.move_to_end((tenant, response))
        while len(self._engines) > KEPT_MAX:
            self._engines.popitem(last=False)

    def engine(self, tenant: str, response: str) -> str | None:
        """The engine that has a response; None where it is not known."""
        return self._engines.get((tenant, response)) if len(response) <= ID_CHARACTERS_MAX else None
