"""TTFT of vLLM with and without stored prefixes: `objectcache bench engine`."""
