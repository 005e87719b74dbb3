"""Editing the config file in place: after any failure the old or the new file is there, and the new file loads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from objectcache.cli.config import ConfigError, load_config
from objectcache.cli.config_text import ConfigTextError

Edit = Callable[[str], str]


def check_edit(path: Path, edit: Edit) -> None:
    """Check that `edit` can be applied to the file. Raises ConfigError, OSError."""
    _edited(path, edit)


def edit_file(path: Path, edit: Edit) -> None:
    """Edit the file, or make it. Raises ConfigError where it cannot be edited, or would not be a valid configuration
    afterwards; OSError.
    """
    place = path.resolve()  # a symbolic link stays; the file it points to is replaced
    replace_text(place, _edited(place, edit), lambda made: load_config(made).scheduler_settings())


def replace_text(place: Path, text: str, check: Callable[[Path], object] = Path.exists) -> None:
    """Put a file with this text in the place of the one that is there, if any, after `check` has seen it. After any
    failure the old or the new file is there. Raises OSError, and what `check` raises.
    """
    fd, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            if place.exists():
                old = place.stat()
                os.fchmod(file.fileno(), old.st_mode & 0o7777)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.flush()
            os.fsync(file.fileno())
        check(Path(name))
        Path(name).replace(place)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _edited(path: Path, edit: Edit) -> str:
    """The file's text after the edit, with its own line ends. A file that does not exist has an empty text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        text = ""
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: it is not UTF-8") from None
    try:
        return edit(text)
    except ConfigTextError as error:
        raise ConfigError(f"{path}: {error}") from None
