"""`bench overlap`: the paper's section 5.3, figures 12 and A4 to A7, and the part of them that this machine carries."""
