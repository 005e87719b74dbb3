"""The embedded store: immutable extents on files, one SQLite index, atomic publish."""
