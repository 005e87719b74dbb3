"""Codecs, the wire, quality on models that were trained here, and the choice among codecs and tiers."""
