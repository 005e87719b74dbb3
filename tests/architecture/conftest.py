"""These tests read the repository, and need nothing else."""

from __future__ import annotations

from tests.support.confinement import confinement  # noqa: F401 - a fixture for every test of this folder
