"""Libraries with kernels of their own, each made to run on a card without data."""
