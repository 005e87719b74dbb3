"""`bench cluster`: Table VII and Figure 3 of CASCADE, and three real servers beside one."""
