"""`bench orchestrator`: routing decisions, simulated, live, and what they cost."""
