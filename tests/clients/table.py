"""The compatibility table, from a run's results. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tests.clients.drivers.contract import OPERATIONS, Result

_HEAD = """# Compatibility

Each client below, in the version given, does these six things against a running server, and every byte is compared.
What it stores is also read back by an independent reader, and what it lists is compared with what was stored. Objects
have 0 bytes, 1 byte, 1,000 bytes and 100 KiB under names with spaces, `+`, `%41`, `&`, other alphabets and folders; in
parts, 20 MiB or more. Addressing is path-style over http unless a note says otherwise. `tests/test_clients.py` runs the
same; this file is written by

    make compatibility

"""


def render(runs: Sequence[Sequence[Result]], over_tls: Sequence[str]) -> str:
    """Markdown: a row for each client, a column for each operation, then the notes the cells refer to."""
    notes: list[str] = []
    lines = ["| client | version | " + " | ".join(OPERATIONS) + " |", "|---" * (len(OPERATIONS) + 2) + "|"]
    for results in runs:
        cells = [_cell(result, notes) for result in results]
        lines.append(f"| {results[0].client} | {results[0].version} | " + " | ".join(cells) + " |")
    text = _HEAD + "\n".join(lines) + "\n"
    if notes:
        text += "\n" + "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1)) + "\n"
    if over_tls:
        text += f"\nAlso over https, with a certificate from an authority of its own: {', '.join(over_tls)}.\n"
    return text


def _cell(result: Result, notes: list[str]) -> str:
    word = {True: "yes", False: "**no**", None: "n/a"}[result.ok]
    note = result.detail.splitlines()[0] if result.detail else ""
    if not note:
        return word
    if note not in notes:
        notes.append(note)
    return f"{word} ({notes.index(note) + 1})"
