"""Facts as tables, one row each: optimizers, quantisations, precisions, trainers, rules, cautions, kernels."""
