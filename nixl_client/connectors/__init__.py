"""ObjectCache in inference engines."""
