"""`objectcache bench scheduler`: policies and slack-aware dispatch, simulated and on a real server."""
