"""Clients' agents and requests: whose memory is registered, and which ids were used."""
