"""Slot files, slots and requests of llama.cpp's server. Pure."""
