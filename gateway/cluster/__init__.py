"""One storage side out of many: requests are split among the members of a cluster, and their answers are merged."""
