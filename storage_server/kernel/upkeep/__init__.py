"""Upkeep: the work that the server does by itself to keep a store sound and small."""
