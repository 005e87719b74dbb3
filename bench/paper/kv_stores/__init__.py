"""KV stores behind one face, CASCADE's StorageAdapter (section III-G), each in a process of its own."""
