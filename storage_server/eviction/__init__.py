"""Which chunks a bounded cache keeps. Pure: no clock, no bytes; times are arguments."""
