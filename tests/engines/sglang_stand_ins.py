"""Modules in place of those that SGLang imports and that have no build for CPUs: its kernels, pictures, and notebooks.
Nothing of them is called where these tests go: pools of host memory, storage, and the threads between.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ABSENT = frozenset({"IPython", "sgl_kernel", "torchvision"})
"""Top names that stand-ins are given for."""


class _Anything(type):
    """A class whose every attribute is such a class again, so that decorators, bases and enumerations can be named."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StandIn(ModuleType):
    """A module whose every attribute is there. transformers asks for the version."""

    __path__: Sequence[str] = ()
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of ABSENT, however deep."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """Give the stand-ins. To be called before SGLang is imported."""
    sys.meta_path.append(_Finder())
