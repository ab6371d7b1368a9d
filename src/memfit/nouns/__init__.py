"""The data types every room uses: frozen dataclasses without I/O and without a heavy library."""
