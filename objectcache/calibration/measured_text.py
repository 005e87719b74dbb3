"""The text that models are measured with."""

from __future__ import annotations

import sys
from pathlib import Path

TEXT_BYTES_MAX = 4 << 20


def text_of(file: Path | None) -> tuple[str, str]:
    """The text to measure with, and its name: the first TEXT_BYTES_MAX of a file, or what Python's own documentation
    says of the language. Raises OSError, and ValueError where this Python has no documentation.
    """
    if file is not None:
        with file.open("rb") as opened:
            return opened.read(TEXT_BYTES_MAX).decode(errors="replace"), str(file)
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python comes without its documentation (pydoc_data): name a file of text") from None
    return "\n\n".join(
        topics[name] for name in sorted(topics)
    ), f"Python {sys.version_info[0]}.{sys.version_info[1]} docs"
