"""Fetching a prefix: the fetch, what is known of its delivery, and who runs it over each transport."""
