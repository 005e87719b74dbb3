"""Counters out of what a server's metrics page says."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from prometheus_client.parser import text_string_to_metric_families

from nixl_client.transports.transport import Transport
from objectcache.calibration.servers import LocalServer


def counted(page: str, names: Collection[str]) -> dict[str, float]:
    """The sums over all labels, by name as on the page; 0 for one that is not there."""
    found = dict.fromkeys(names, 0.0)
    for sample in chain.from_iterable(family.samples for family in text_string_to_metric_families(page)):
        if sample.name in found:
            found[sample.name] += sample.value
    return found


def page_of(server: LocalServer) -> str:
    """The metrics page of a server of ours."""
    with server.client(Transport.HTTP) as client:
        return client.http.request("GET", "/_objectcache/metrics").body.decode()
