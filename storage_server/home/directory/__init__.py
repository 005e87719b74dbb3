"""A directory on a shared file system as the home of objects, which any number of servers use together."""
