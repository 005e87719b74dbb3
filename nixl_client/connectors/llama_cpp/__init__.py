"""llama.cpp's server over ObjectCache: a proxy in front of it, which brings KV into its slots and stores it from there
(docs/guides/llama-cpp.md).
"""
