"""torch.distributed on a virtual card whose other ranks do not exist."""
