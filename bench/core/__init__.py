"""Shared by all experiments: the head of a command, settings, the form of results, and values that travel in lines."""
