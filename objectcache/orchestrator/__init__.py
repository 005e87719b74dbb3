"""The orchestrator: sends each request to the engine whose first token will come soonest."""
