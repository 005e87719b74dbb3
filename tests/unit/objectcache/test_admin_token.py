"""The token of `/_orchestrator`: set by the operator, or made once and found again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from objectcache.cli import admin_token
from objectcache.cli.config import ConfigError

TOKEN = "a-token-of-sixteen-letters"


def test_a_token_is_made_once_for_the_users_eyes_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = {"HOME": str(tmp_path)}
    assert admin_token.known(home) is None
    token = admin_token.find_or_make(home)
    file = tmp_path / ".local" / "state" / "objectcache" / "admin-token"
    assert file.read_text().strip() == token
    assert len(token) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert str(file) in capsys.readouterr().err
    assert admin_token.find_or_make(home) == admin_token.known(home) == token
    assert capsys.readouterr().err == ""


def test_what_the_operator_sets_counts_first(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    made = admin_token.find_or_make(home)
    assert (tmp_path / "state" / "objectcache" / "admin-token").exists()
    assert admin_token.known({**home, admin_token.VARIABLE: TOKEN}) == TOKEN != made
    assert admin_token.find_or_make({admin_token.VARIABLE: TOKEN}) == TOKEN


@pytest.mark.parametrize("wrong", ["short", "x" * 300])
def test_a_token_of_another_length_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="from 16 to 256 characters"):
        admin_token.known({admin_token.VARIABLE: wrong})


def test_an_empty_variable_counts_as_none(tmp_path: Path) -> None:
    """As compose files give it: ${OBJECTCACHE_ADMIN_TOKEN:-}."""
    home = {"HOME": str(tmp_path)}
    assert admin_token.find_or_make({**home, admin_token.VARIABLE: ""}) == admin_token.known(home)
    assert [path.name for path in (tmp_path / ".local" / "state" / "objectcache").iterdir()] == ["admin-token"]


@pytest.mark.parametrize("kind", ["readable", "link", "fifo", "empty", "bytes"])
def test_a_file_that_cannot_be_trusted_is_refused(tmp_path: Path, kind: str) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    file = tmp_path / "objectcache" / "admin-token"
    file.parent.mkdir()
    if kind == "link":
        (tmp_path / "other").write_text(TOKEN)
        file.symlink_to(tmp_path / "other")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.write_bytes({"readable": TOKEN.encode(), "empty": b"", "bytes": b"\xff" * 32}[kind])
        file.chmod(0o644 if kind == "readable" else 0o600)
    for call in (admin_token.known, admin_token.find_or_make):
        with pytest.raises(ConfigError):
            call(home)


def test_without_a_place_for_it_the_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=admin_token.VARIABLE):
        admin_token.find_or_make({})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=admin_token.VARIABLE):
        admin_token.find_or_make({"XDG_STATE_HOME": str(tmp_path / "file")})
