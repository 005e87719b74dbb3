"""What the tier decides. Pure: no clock, no network, no vLLM."""
