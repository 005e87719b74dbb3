"""The index: the bytes that make up each object. It is one SQLite file; a commit there publishes."""
