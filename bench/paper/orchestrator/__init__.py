"""`bench orchestrator`: the control plane's latency model, and serving, simulated and with real engines."""
