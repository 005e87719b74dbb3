"""Which chunks are kept in which tier, with which codec. Pure: no clock, file or thread."""
