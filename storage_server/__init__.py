"""The data plane: an embedded store, and the pipeline (plan, mode, schedule, gather, send) that serves a descriptor."""
