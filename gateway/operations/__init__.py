"""The operations: one S3 verb family per module. A function takes a Call and returns the answer."""
