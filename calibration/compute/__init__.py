"""What a decoder layer's prefill costs: measured on this machine, and fitted."""
