"""The tier's decisions. Pure: no clock, no network, no vLLM."""
