"""The messages, besides notices, between a client and a storage server on one host, over the server's Unix socket.

Packets of JSON. The server greets with {"objectcache": 1, "ticket": …}; the client offers a region with {"region_id",
"length"} and the memfd as ancillary data; the server replies {"error": null} or {"error": why}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from descriptors.descriptor import ADDRESS_MAX, PROTOCOL_VERSION, require_name
from descriptors.errors import CallerError

MESSAGE_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class RegionOffer:
    """Offers the first `nbytes` of the memfd that comes with it, under the name `region_id`."""

    region_id: str
    nbytes: int


class _Offer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    region_id: str
    length: Annotated[int, Field(ge=1, le=ADDRESS_MAX)]


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
    """The offer in a message. Raises ValueError."""
    try:
        model = _Offer.model_validate_json(data)
        require_name(model.region_id, "region_id")
    except (ValidationError, CallerError) as error:
        raise ValueError(f"not an offer: {error}") from error
    return RegionOffer(model.region_id, model.length)


def reply(error: str | None) -> bytes:
    """The answer to an offer: None where it was accepted, else the reason."""
    return json.dumps({"error": None if error is None else error[:1000]}).encode()


def parse_reply(data: bytes) -> str | None:
    """The reason why the offer was refused; None when it was accepted. Raises ValueError."""
    error = json.loads(data)["error"]
    return None if error is None else str(error)
