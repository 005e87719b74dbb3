"""The demo: a real model answers a question about a long document whose KV cache comes out of ObjectCache."""
