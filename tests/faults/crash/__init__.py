"""The crash harness: a server is killed in the middle of its work, and asked afterwards what it still knows."""
