"""Runs: a plan trained for real, in steps that survive running out of memory. Nothing is imported before it is needed."""
