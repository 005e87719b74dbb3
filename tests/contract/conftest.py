"""Contract tests of what lives in this process need nothing else; the others are marked `needs_server`."""

from __future__ import annotations

from tests.support.confinement import confinement  # noqa: F401 - a fixture for every test of this folder
