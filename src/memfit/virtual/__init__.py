"""The virtual GPU: real PyTorch code on a card that has an allocator and no memory."""
