"""The serving node: ask for a cached prefix in one signed request and take its layers as they arrive."""
