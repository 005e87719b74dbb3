"""Scripts, one for each client, run in the clients' interpreters; `contract` is what the runner shares with them."""
