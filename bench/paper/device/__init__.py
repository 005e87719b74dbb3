"""A real model on a real device: time to first token with loaded KV, what coarse chunks cost, pinned copies by size."""
