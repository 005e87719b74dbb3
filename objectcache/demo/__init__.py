"""The main job on a real model: it answers a question about a document whose KV ObjectCache delivers layer by layer."""
