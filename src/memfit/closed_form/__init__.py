"""The byte account without torch: model code rewritten for tensors that have only a size, and reduced to peaks."""
