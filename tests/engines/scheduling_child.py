"""Plays scenarios in the engines' environment: a line of JSON names one and its arguments, a line answers.

python -m tests.engines.scheduling_child FOLDER
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

SCENARIO_S = 100.0
"""A scenario that takes longer hangs; the process says where, and ends."""
START_S = 200.0


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.dump_traceback_later(START_S, exit=True)
    from tests.engines import (
        scheduled_ahead,
        scheduled_lookups,
        scheduled_losses,
        scheduled_refusals,
        scheduled_simulation,
        scheduled_stores,
        scheduled_tier,
    )
    from tests.engines.scheduled_config import make_config

    modules = (
        scheduled_ahead,
        scheduled_losses,
        scheduled_lookups,
        scheduled_refusals,
        scheduled_simulation,
        scheduled_stores,
        scheduled_tier,
    )
    scenarios = {name: getattr(module, name) for module in modules for name in module.__all__}
    folder = Path(sys.argv[1])
    make_config(folder)
    for line in sys.stdin:
        asked = json.loads(line)
        faulthandler.dump_traceback_later(SCENARIO_S, exit=True)
        answer: dict[str, Any]
        try:
            answer = {"facts": scenarios[asked["scenario"]](folder, **asked["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
