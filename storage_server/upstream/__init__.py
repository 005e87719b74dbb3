"""An S3 service as the home of all objects: ObjectCache stands in front of it."""
