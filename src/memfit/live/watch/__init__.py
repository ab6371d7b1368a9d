"""Live memory: of a training loop from inside (loop.watch, callbacks), of a command from outside. Imports nothing heavy."""
