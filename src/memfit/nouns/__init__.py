"""The nouns every room speaks of: frozen dataclasses without I/O and without a heavy library."""
