"""The storage server as a whole: its parts put together, its API over HTTP, its metrics."""
