"""Which chunks a bounded cache keeps, and in which form. Pure: no clock, no bytes; times are arguments."""
