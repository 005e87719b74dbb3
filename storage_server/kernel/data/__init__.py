"""The data: extents in files, written once and proved whenever they are read."""
