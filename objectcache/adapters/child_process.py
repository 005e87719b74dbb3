"""Processes of their own for engines whose peers nobody authenticates, or whose calls hang: UCX and Mooncake. They get
a socket to the server and memory that is named to them, and no credentials.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from objectcache.adapters.memory_area import SharedArea

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "TMPDIR")
_KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "ASAN_")


def child_environment(environment: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables that are not secret: those that any program needs, and those whose names begin so."""
    kept = _KEPT_PREFIXES + prefixes
    root = str(Path(__file__).resolve().parents[2])
    return {
        **{name: value for name, value in environment.items() if name in _KEPT or name.startswith(kept)},
        "PYTHONPATH": root,
    }


async def spawned(
    module: str, areas: Sequence[SharedArea], environment: Mapping[str, str]
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start `python -m MODULE FD [FD:NBYTES:rw|ro ...]`, which gets these areas and the other end of the socket. Raises
    OSError.
    """
    ours, theirs = socket.socketpair()
    try:
        shared = [f"{area.fd}:{area.nbytes}:{'ro' if area.is_read_only else 'rw'}" for area in areas]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, str(theirs.fileno()), *shared),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *[area.fd for area in areas]),
            env=environment,
            cwd="/",
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def end_with_parent() -> None:
    """In the child: have the kernel end this process (SIGKILL) when the parent's thread that started it ends, whatever
    this process does then.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def begun(arguments: Sequence[str]) -> tuple[socket.socket, list[tuple[int, int]]]:
    """In the child: its socket, and its areas (address, nbytes), mapped. Raises OSError."""
    for number in (signal.SIGINT, signal.SIGHUP):  # meant for the server, which ends this process by closing the socket
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the areas hold tenants' bytes, which no core file may keep
    return socket.socket(fileno=int(arguments[0])), [_mapped(text) for text in arguments[1:]]


def _mapped(text: str) -> tuple[int, int]:
    """Map an area given as FD:NBYTES:rw or ro, and close the descriptor."""
    fd, nbytes, access = text.split(":")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if access == "rw" else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    address = libc.mmap(None, int(nbytes), protection, mmap.MAP_SHARED, int(fd), 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "an area cannot be mapped")
    os.close(int(fd))
    return int(address), int(nbytes)
