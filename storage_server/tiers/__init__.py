"""Copies of chunks nearer than the store: in memory."""
