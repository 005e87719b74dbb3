"""One package or module for each sub-command: what is planned, measured and judged."""
