"""Records, stamps and shares of a shared directory. Pure: no file, no clock."""
