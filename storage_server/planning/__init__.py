"""Plans of what is read and sent, computed before any byte moves. Pure."""
