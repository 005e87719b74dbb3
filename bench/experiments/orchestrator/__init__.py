"""`bench orchestrator`: routing decisions, what they cost, and engines that share a store."""
