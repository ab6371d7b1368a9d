"""Clues from a recorded history: which tensors were alive, since when, and what kept them."""
