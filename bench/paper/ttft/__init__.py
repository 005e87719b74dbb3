"""`objectcache bench ttft`: time to first token over played compute windows (ObjectCache paper, Figures 13 to 15)."""
