"""The repository's root holds what belongs there: no package or archive has come into it by chance."""

from __future__ import annotations

from tests.support.tree import repository

PACKED = (".whl", ".gz", ".zip", ".tar", ".deb", ".db", ".bin")


def test_no_package_lies_in_the_root() -> None:
    assert [path.name for path in repository().iterdir() if path.suffix in PACKED] == []
