"""Deliveries: chunks are planned, gathered and sent to clients, in the order and at the rate of the link."""
