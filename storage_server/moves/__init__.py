"""Whole objects into and out of clients' registered memory."""
