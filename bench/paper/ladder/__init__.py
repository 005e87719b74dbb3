"""`bench ladder`: the paper's figures of its ladder, from the raw store up to aggregated layers, on this machine."""
