"""Homes: where objects lie for good. The embedded store is one; another S3 service and a shared directory are others,
with the embedded store as a cache of their chunks.
"""
