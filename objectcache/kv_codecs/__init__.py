"""Encoding and decoding of KV, layer by layer. Servers and clients both use it. The name is not `codecs`, because that
is a module of the standard library.
"""
