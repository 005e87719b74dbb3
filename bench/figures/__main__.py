"""Write the figures into the documents: `python -m bench.figures [--check]`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.figures import sections
from bench.figures.values import Json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "figures.md")
SECTIONS: Mapping[str, tuple[str, Callable[[Json], str]]] = {
    "transports": ("aggregate", sections.transports),
    "peers": ("aggregate", sections.peers),
    "limits": ("aggregate", sections.limits),
    "first-layers": ("aggregate", sections.first_layers),
    "shared-link": ("scheduler-live", sections.shared_link),
    "simulated": ("scheduler-simulated", sections.simulated),
    "ttft": ("ttft", sections.ttft),
    "engine": ("engine", sections.engine),
    "advised": ("engine-advised", sections.advised),
    "s3": ("s3", sections.plain_s3),
    "ladder": ("ladder", sections.ladder),
    "theta": ("calibrate", sections.theta),
    "crash": ("crash", sections.crash),
    "demo": ("demo", sections.demo),
}
COMMITS = "commits"
_PLACE = re.compile(r"(<!-- figures: (?P<name>[a-z0-9-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def load(folder: Path = RESULTS) -> dict[str, Json]:
    """Every published result by name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def render(document: str, results: Mapping[str, Json]) -> str:
    """The document with each place of figures filled. Raises KeyError for a section or a result that there is not."""

    def fill(found: re.Match[str]) -> str:
        name = found["name"]
        if name == COMMITS:
            text = sections.commits(results)
        else:
            result, section = SECTIONS[name]
            text = section(results[result])
        return f"{found[1]}{text}\n{found[3]}"

    return _PLACE.sub(fill, document)


def main() -> int:
    """0: written, or with --check nothing to write; 1: a document is not what the results say."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say which document differs")
    check = parser.parse_args().check
    results = load()
    stale = []
    for file in DOCUMENTS:
        text = file.read_text()
        wanted = render(text, results)
        if wanted != text:
            stale.append(file.name)
            if not check:
                file.write_text(wanted)
    if check and stale:
        print(f"not what docs/results says: {', '.join(stale)}; run `make figures`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
