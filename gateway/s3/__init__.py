"""S3's language: addresses, signatures, headers, documents and routes. Pure: no socket, file, thread or clock."""
