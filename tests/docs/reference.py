"""Write the settings of docs/reference/configuration.md from the models that check them: `make reference`."""

from __future__ import annotations

import re
from pathlib import Path

from objectcache.cli.config import Config
from objectcache.cli.config_reference import reference
from tests.support.tree import repository

PAGE = Path("docs/reference/configuration.md")
MARK = "<!-- settings: made by `make reference` -->"
_BLOCK = re.compile(rf"(?<={re.escape(MARK)}\n\n```toml\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def written(page: str) -> str:
    """The page with the settings of now. Raises ValueError where it has no place for them."""
    new, count = _BLOCK.subn(lambda _: reference(Config, as_comments=False), page)
    if count != 1:
        raise ValueError(f"{PAGE} has no block of settings")
    return new


def main() -> None:
    page = repository() / PAGE
    page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
