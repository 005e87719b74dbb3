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
    """The engines of the last responses, by tenant and id: no tenant may ask for those of others. There are KEPT_MAX of
    all: where there would be more, the tenant that has most gives up its oldest one.
    """

    def __init__(self) -> None:
        self._engines: dict[str, OrderedDict[str, str]] = {}
        self._count = 0

    def note(self, tenant: str, response: str, engine: str) -> None:
        """This engine has given a response."""
        mine = self._engines.setdefault(tenant, OrderedDict())
        self._count += response not in mine
        mine[response] = engine
        mine.move_to_end(response)
        if self._count > KEPT_MAX:
            largest = max(self._engines, key=lambda each: len(self._engines[each]))
            self._engines[largest].popitem(last=False)
            self._count -= 1
            if not self._engines[largest]:
                del self._engines[largest]

    def engine(self, tenant: str, response: str) -> str | None:
        """The engine that has a response; None where it is not known."""
        mine = self._engines.get(tenant)
        return None if mine is None or len(response) > ID_CHARACTERS_MAX else mine.get(response)
