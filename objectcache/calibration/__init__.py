"""The measurements of `objectcache calibrate`: the threshold between the orders, a link, and what a model's prefill
costs.

The benchmarks of a checkout measure with the same servers, chunks, samples and rounds.
"""
