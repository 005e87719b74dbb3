"""The S3 front: it authenticates and routes requests and writes XML. Object bytes and descriptors pass through it."""
