"""Transports: one interface through which payloads reach the client, with http, shm and ucx behind it."""
