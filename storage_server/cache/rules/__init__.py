"""The books of caches: what they have, what is on its way out, and where in memory it lies. Pure: no clock."""
