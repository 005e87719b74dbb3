"""Where chunks live besides the store: memory."""
