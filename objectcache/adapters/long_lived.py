"""Objects that live as long as the process. A full collection of garbage stops every thread for half a microsecond for
each object that it visits, and needs to visit none of these.
"""

from __future__ import annotations

import gc


def note_long_lived() -> None:
    """All objects that exist now live long. Garbage in cycles among them is never collected, so this is for a start."""
    gc.freeze()
