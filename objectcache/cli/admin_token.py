"""The token of `/_orchestrator`: what the operator sets, or else one that is made once for each user of a host.

The made token lies in $XDG_STATE_HOME/objectcache/admin-token (~/.local/state without that variable), which only the
user may read. The orchestrator and the commands that ask it find it there.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from objectcache.adapters.beneath import Beneath
from objectcache.cli.config import ConfigError

VARIABLE = "OBJECTCACHE_ADMIN_TOKEN"
TOKEN_CHARACTERS_MIN, TOKEN_BYTES_MAX = 16, 256


def find_or_make(environment: Mapping[str, str]) -> str:
    """The token; a new one is told with its file. Raises ConfigError."""
    if token := known(environment):
        return token
    place = _place(environment)
    try:
        place.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = place.with_name(f"{place.name}.{secrets.token_hex(6)}")
        made.write(secrets.token_urlsafe(32).encode() + b"\n")
        try:
            made.link(place)  # whole, or not at all
        finally:
            made.unlink()
    except FileExistsError:  # another orchestrator has just made it
        return find_or_make(environment)
    except OSError as error:
        problem = f"the admin token cannot be kept in {place}: {error.strerror}; set {VARIABLE}"
        raise ConfigError(problem) from None
    print(f"new admin token for /_orchestrator, kept in {place}", file=sys.stderr, flush=True)
    return find_or_make(environment)


def known(environment: Mapping[str, str]) -> str | None:
    """The token that is set or was made; None for neither. Raises ConfigError."""
    token, where = environment.get(VARIABLE) or None, VARIABLE
    if token is None:
        place = _place(environment)
        with contextlib.suppress(FileNotFoundError):
            token, where = _kept(place), str(place)
    if token is None:
        return None
    if not TOKEN_CHARACTERS_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise ConfigError(f"{where} must have from {TOKEN_CHARACTERS_MIN} to {TOKEN_BYTES_MAX} characters")
    return token


def _kept(place: Beneath) -> str:
    try:
        if place.status().st_mode & 0o077:
            raise ConfigError(f"{place}: others may read this token; remove the file to have a new one made")
        return place.read(TOKEN_BYTES_MAX + 1).decode().strip()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: {error}; remove the file to have a new one made, or set {VARIABLE}") from None


def _place(environment: Mapping[str, str]) -> Beneath:
    home, state = environment.get("HOME"), environment.get("XDG_STATE_HOME")
    if not home and not state:
        raise ConfigError(f"without HOME there is no place for the admin token: set {VARIABLE}")
    folder = Path(state) if state else Path(home or "") / ".local" / "state"
    return Beneath(folder / "objectcache", "admin-token")
