"""The messages, besides notices, between a client and a storage server on one host, over the server's Unix socket.

Packets of JSON. The server greets with {"objectcache": 1, "ticket": …}; the client offers a region with {"region_id",
"length"} and the memfd as ancillary data; the server replies {"error": null} or {"error": why}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from descriptors.descriptor import ADDRESS_MAX, PROTOCOL_VERSION, require_name
from descriptors.errors import CallerError

MESSAGE_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class RegionOffer:
    """Offers the first `nbytes` of the memfd that comes with it, under the name `region_id`."""

    region_id: str
    nbytes: int


def greeting(ticket: str) -> bytes:
    """The server's first packet."""
    return json.dumps({"objectcache": PROTOCOL_VERSION, "ticket": ticket}).encode()


def parse_greeting(data: bytes) -> str:
    """The ticket. Raises ValueError for anything but a greeting of this version."""
    fields = json.loads(data)
    if not isinstance(fields, dict) or fields.get("objectcache") != PROTOCOL_VERSION:
        raise ValueError("not an ObjectCache server of this version")
    return str(fields["ticket"])


def offer_message(offer: RegionOffer) -> bytes:
    """The message that `parse_offer` reads."""
    return json.dumps({"region_id": offer.region_id, "length": offer.nbytes}).encode()


def parse_offer(data: bytes) -> RegionOffer:
    """The offer in a message. Raises ValueError, which names the first mistake only: a list of all of them, as pydantic
    makes it, keeps the event loop for milliseconds.
    """
    try:
        fields = json.loads(data.decode())
        if not isinstance(fields, dict) or fields.keys() != {"region_id", "length"}:
            raise ValueError("it needs region_id and length, and nothing else")
        region_id, nbytes = require_name(fields["region_id"], "region_id"), fields["length"]
        if type(nbytes) is not int or not 1 <= nbytes <= ADDRESS_MAX:
            raise ValueError(f"length must be an integer from 1 to {ADDRESS_MAX}")
    except (ValueError, RecursionError, CallerError) as error:
        raise ValueError(f"not an offer: {error}") from error
    return RegionOffer(region_id, nbytes)


def reply(error: str | None) -> bytes:
    """The answer to an offer: None where it was accepted, else the reason."""
    return json.dumps({"error": None if error is None else error[:1000]}).encode()


def parse_reply(data: bytes) -> str | None:
    """The reason why the offer was refused; None when it was accepted. Raises ValueError."""
    error = json.loads(data)["error"]
    return None if error is None else str(error)
