"""Reading the slices of many chunks into one payload."""
