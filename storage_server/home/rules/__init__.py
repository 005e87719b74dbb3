"""The pure part of a cache before a home: decisions, S3 documents, and the values that travel. Pure: no socket, file,
thread or clock.
"""
