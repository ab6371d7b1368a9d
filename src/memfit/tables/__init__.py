"""Facts as tables, one row each: optimizers, quantisations, trainers, what cannot be combined, what must be said, kernels."""
