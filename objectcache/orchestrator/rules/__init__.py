"""The orchestrator's decisions. Pure: no clock, socket, file or thread; the time is an argument."""
