"""The cost of a decoder layer's prefill: measured on this machine, and fitted."""
