"""Measurements of the data path. Each figure comes with the rate of what it competes with, taken in the same run."""
