"""The tables of the control plane: its latency model, and serving, simulated and with real engines."""
