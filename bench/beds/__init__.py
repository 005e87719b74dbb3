"""Servers, peers, loads and raw limits that experiments measure, and the processes that these run in."""
