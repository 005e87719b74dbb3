"""What `objectcache calibrate` measures, and what follows from it for Theta and the scheduler."""
