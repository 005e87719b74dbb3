"""The S3 front: authentication, routing, XML; object bytes and descriptors go through to the storage side."""
