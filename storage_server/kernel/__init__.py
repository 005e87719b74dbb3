"""The kernel: objects and extents on files, one SQLite index, atomic publish. It knows no cache and no other home."""
