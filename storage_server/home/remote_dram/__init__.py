"""Chunks in the pooled memory of a Mooncake Store, between this server and the home."""
