"""Rows, lists, plans of compaction and hashes of bodies. Pure: no file, no index."""
