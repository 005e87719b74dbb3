"""Real S3 clients against a running server: each in its own interpreter, by one suite of six operations."""
