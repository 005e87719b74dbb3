"""Unit tests need no server, no network and no other process."""

from __future__ import annotations

from tests.support.confinement import confinement  # noqa: F401 - a fixture for every test of this folder
