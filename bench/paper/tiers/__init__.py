"""`bench tiers`: eviction policies on recorded request streams, beside the best that knowledge of the future allows."""
