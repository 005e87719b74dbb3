"""The compatibility table, from a run's results. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tests.clients.drivers.contract import OPERATIONS, Result

_HEAD = """# Compatibility

Each client below, in the version given, does these six things against a running server, and every byte is compared.
Its objects are also read back by an independent reader, and its listings are compared with the stored objects. Objects
have 0 bytes, 1 byte, 1,000 bytes and 100 KiB under names with spaces, `+`, `%41`, `&`, other alphabets and folders; in
parts, 20 MiB or more. Addressing is path-style over http unless a note says otherwise. The last column says whether the
client does the same in front of another S3 service ([docs/guides/upstream.md](upstream.md)), here a second ObjectCache.
`tests/clients/test_clients.py` runs the same; this file is written by

    make compatibility

"""


def render(runs: Sequence[Sequence[Result]], in_front: Sequence[Sequence[Result]], over_tls: Sequence[str]) -> str:
    """Markdown: a row for each client, a column for each operation, then the notes the cells refer to. `in_front` are
    the runs in front of another service, of the same clients in the same order.
    """
    notes: list[str] = []
    heads = ("client", "version", *OPERATIONS, "upstream")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for results, fronted in zip(runs, in_front, strict=True):
        cells = [*(_cell(result, notes) for result in results), _same(results, fronted)]
        lines.append(f"| {results[0].client} | {results[0].version} | " + " | ".join(cells) + " |")
    text = _HEAD + "\n".join(lines) + "\n"
    if notes:
        text += "\n" + "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1)) + "\n"
    if over_tls:
        line = f"Also over https, with a certificate from an authority of its own: {', '.join(over_tls)}."
        text += "\n" + "\n".join(textwrap.wrap(line, 120, break_on_hyphens=False)) + "\n"
    return text


def _same(results: Sequence[Result], fronted: Sequence[Result]) -> str:
    """Whether the client did upstream what it did without."""
    different = [each.operation for here, each in zip(results, fronted, strict=True) if here.ok is not each.ok]
    return f"**no**: {', '.join(different)}" if different else "yes"


def _cell(result: Result, notes: list[str]) -> str:
    word = {True: "yes", False: "**no**", None: "n/a"}[result.ok]
    note = result.detail.splitlines()[0] if result.detail else ""
    if not note:
        return word
    if note not in notes:
        notes.append(note)
    return f"{word} ({notes.index(note) + 1})"
