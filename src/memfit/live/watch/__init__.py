"""Watching a training loop from inside: memfit.watch, callbacks, the leak test and the leak search. Imports nothing."""
