"""How payloads reach the client: one interface, http and ucx behind it."""
