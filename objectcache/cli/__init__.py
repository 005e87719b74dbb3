"""Composition: configuration, the command line, and the one place that joins gateway and storage server."""
