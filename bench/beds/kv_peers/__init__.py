"""Other software doing the work of `bench aggregate`, each in an interpreter of its own."""
