"""A Footprint of every kind of run, predicted, traced or watched, and what follows from two of them: a comparison, a band."""
