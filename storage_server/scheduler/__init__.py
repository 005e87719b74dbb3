"""Which mode, and who may send now."""
