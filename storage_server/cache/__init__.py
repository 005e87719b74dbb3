"""Caches: which chunks stay on the disk and in memory, in which form, and what leaves for others."""
