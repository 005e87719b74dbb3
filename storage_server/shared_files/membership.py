"""Which shared directory a data directory belongs to, and which writer it is there.

ROOT/format.json             the number of the format, and the directory's id
DATA/shared/home.json        the id of the shared directory, and the writer's
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from storage_server.shared_files.records import WRITER

FORMAT = 1


class WrongHomeError(Exception):
    """The shared directory is not the one that it should be; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Membership:
    """`home` names the shared directory, `writer` this server in it."""

    home: str
    writer: str


def joined(root: Path, local: Path) -> Membership:
    """Join a shared directory, or come back to it. Raises WrongHomeError, OSError."""
    if not root.is_dir():
        raise WrongHomeError(f"{root} is no directory: is the file system mounted?")
    mark = local / "home.json"
    known = _read(mark)
    if known is None:
        home = _home(root)
        membership = Membership(home, secrets.token_hex(6))
        (root / "writers" / membership.writer).mkdir(parents=True, mode=0o700)
        local.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(mark, {"home": membership.home, "writer": membership.writer})
        return membership
    membership = Membership(str(known.get("home")), str(known.get("writer")))
    if not WRITER.match(membership.writer):
        raise WrongHomeError(f"{mark} cannot be read: use another data directory")
    found = _read(root / "format.json")
    if found is None or found.get("id") != membership.home or not (root / "writers" / membership.writer).is_dir():
        raise WrongHomeError(
            f"{root} is not the directory that {local.parent} is a cache of: is the right file system mounted?"
            " Otherwise use another data directory"
        )
    return membership


def _home(root: Path) -> str:
    """The id of the shared directory; a new one gets it here. Of servers that start at once one is first."""
    path = root / "format.json"
    if _read(path) is None:
        if any(each.name != "lost+found" and not each.name.startswith("format.json") for each in root.iterdir()):
            if _read(path) is not None:  # another server has just made it
                return _home(root)
            raise WrongHomeError(f"{root} holds other files: use an empty directory")
        new = root / f"format.json.{secrets.token_hex(6)}"
        _write(new, {"format": FORMAT, "id": secrets.token_hex(16)})
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
        new.unlink()
    found = _read(path)
    if found is None or found.get("format") != FORMAT or not isinstance(found.get("id"), str):
        raise WrongHomeError(f"{path} is of another release, or damaged")
    return str(found["id"])


def _read(path: Path) -> dict[str, object] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, fields: dict[str, object]) -> None:
    """Durably, and whole or not at all."""
    new = path.with_name(path.name + ".new")
    with open(new, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(fields, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
