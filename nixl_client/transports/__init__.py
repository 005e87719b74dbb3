"""How bytes travel to a client: http, shm and ucx, and the memory that they fill."""
