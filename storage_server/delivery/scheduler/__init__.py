"""The scheduler: it chooses the mode of a delivery, and decides which delivery may send its next payload."""
