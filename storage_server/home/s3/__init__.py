"""An S3 service as the home of all objects."""
