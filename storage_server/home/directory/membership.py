"""Which shared directory a data directory belongs to, and which writer it is there.

ROOT/format.json             the number of the format, and the directory's id
DATA/shared/home.json        the id of the shared directory, and the writer's
"""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from objectcache.adapters.beneath import Beneath
from storage_server.home.directory.rules.records import WRITER, WRITERS

FORMAT = 1
FORMAT_NAME = "format.json"
MARK_BYTES_MAX = 4096


class WrongHomeError(Exception):
    """The shared directory is not the one that it should be; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DirectoryMembership:
    """`home` names the shared directory, `writer` this server in it."""

    home: str
    writer: str


def joined(root: Path, local: Path) -> DirectoryMembership:
    """Join a shared directory, or come back to it. Raises WrongHomeError, OSError."""
    if not root.is_dir():
        raise WrongHomeError(f"{root} is no directory: is the file system mounted?")
    mark, writers = Beneath(local, "home.json"), Beneath(root, WRITERS)
    known = _read(mark)
    if known is None:
        home = _home(root)
        membership = DirectoryMembership(home, secrets.token_hex(6))
        (writers / membership.writer).make_folder()
        local.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(mark, {"home": membership.home, "writer": membership.writer})
        return membership
    membership = DirectoryMembership(str(known.get("home")), str(known.get("writer")))
    if not WRITER.match(membership.writer):
        raise WrongHomeError(f"{mark} cannot be read: use another data directory")
    found = _read(Beneath(root, FORMAT_NAME))
    if found is None or found.get("id") != membership.home or not (writers / membership.writer).is_folder():
        raise WrongHomeError(
            f"{root} is not the directory that {local.parent} is a cache of: is the right file system mounted?"
            " Otherwise use another data directory"
        )
    return membership


def _home(root: Path) -> str:
    """The id of the shared directory; a new one gets it here. Of servers that start at once one is first."""
    place = Beneath(root, FORMAT_NAME)
    if _read(place) is None:
        if any(name != "lost+found" and not name.startswith(FORMAT_NAME) for name in Beneath(root).names()):
            if _read(place) is not None:  # another server has just made it
                return _home(root)
            raise WrongHomeError(f"{root} holds other files: use an empty directory")
        new = place.with_name(f"{FORMAT_NAME}.{secrets.token_hex(6)}")
        _write(new, {"format": FORMAT, "id": secrets.token_hex(16)})
        with contextlib.suppress(FileExistsError):
            new.link(place)
        new.unlink()
    found = _read(place)
    if found is None or found.get("format") != FORMAT or not isinstance(found.get("id"), str):
        raise WrongHomeError(f"{place} is of another release, or damaged")
    return str(found["id"])


def _read(place: Beneath) -> dict[str, object] | None:
    try:
        found = json.loads(place.read(MARK_BYTES_MAX))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(place: Beneath, fields: dict[str, object]) -> None:
    """Durably, and whole or not at all."""
    place.write(json.dumps(fields).encode())
