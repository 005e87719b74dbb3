"""`objectcache bench concurrency`: many descriptor GETs at once."""
