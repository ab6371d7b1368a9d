"""The card itself: its facts, its allocator, the dispatch key CUDA, shapes, storages, streams and statistics."""
