"""`bench upstream`: prefixes that lie in another S3 service, through us, and straight from there by a native client."""
