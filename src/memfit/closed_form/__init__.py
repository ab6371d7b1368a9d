"""The byte account without torch: model code transliterated onto tensors that have only a size, folded into peaks."""
