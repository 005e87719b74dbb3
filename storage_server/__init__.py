"""The data plane: an embedded store, and the pipeline mode, schedule, gather, transport that serves a descriptor."""
