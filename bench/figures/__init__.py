"""Figures of the documents, generated from docs/results: `make figures`. A test holds documents and results to it."""
