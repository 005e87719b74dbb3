"""`bench aggregate`: one descriptor GET of N chunks, over every transport in both orders, beside its competitors."""
