"""Read files that nobody vouches for: their kind, the memory they may take, and what they unfold to."""
