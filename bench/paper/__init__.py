"""The tables of the ObjectCache paper, once, and the published constants of models."""
