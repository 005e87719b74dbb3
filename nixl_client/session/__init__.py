"""The client's session with one server: signing and connections, the registered agent, and where time went."""
