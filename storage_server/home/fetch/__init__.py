"""Chunks on their way from another home into the cache."""
