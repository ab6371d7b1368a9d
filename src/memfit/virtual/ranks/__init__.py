"""torch.distributed on a virtual card: the ranks that do not exist, and what reductions allocate."""
