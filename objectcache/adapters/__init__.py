"""Thin adapters over libraries that more than one process uses: NIXL for both ends of a transfer, aiohttp answers."""
