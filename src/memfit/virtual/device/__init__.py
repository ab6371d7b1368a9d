"""The card itself: its facts, its allocator, PyTorch's dispatch key CUDA, shapes, storage, streams and statistics."""
