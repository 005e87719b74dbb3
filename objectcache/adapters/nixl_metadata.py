"""Reading the agent's name out of NIXL metadata without loading it.

`add_remote_agent` merges metadata into any agent of the same name that is already known. So the name must be checked
before NIXL sees the bytes. NIXL 1.5 serialises: "nixlSerDes|", then tagged fields; the first is "Agent", a
little-endian u64 length, the name, "|".
"""

from __future__ import annotations

import uuid

_HEAD = b"nixlSerDes|Agent"


def agent_name(metadata: bytes) -> str:
    """The agent's name. Raises ValueError when the bytes are not NIXL agent metadata or the name is not a UUID."""
    if not metadata.startswith(_HEAD):
        raise ValueError("not NIXL agent metadata")
    at = len(_HEAD)
    length = int.from_bytes(metadata[at : at + 8], "little")
    raw = metadata[at + 8 : at + 8 + length] if length <= 64 else b""
    try:
        name = raw.decode("ascii")
        canonical = str(uuid.UUID(name))
    except ValueError:
        raise ValueError("the NIXL agent name must be a UUID") from None
    if canonical != name:
        raise ValueError("the NIXL agent name must be a UUID in its usual lower-case form")
    return name
