"""`bench s3`: plain S3 requests on our server, on peers, and on the cheapest senders there can be."""
