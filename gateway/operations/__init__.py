"""One S3 verb family per module: a request value in, an answer out."""
