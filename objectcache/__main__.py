"""`python -m objectcache` is the command `objectcache`."""

from __future__ import annotations

from objectcache.cli.main import main

if __name__ == "__main__":
    main()
