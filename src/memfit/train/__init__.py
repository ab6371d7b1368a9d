"""Runs: a plan is trained for real, and a run survives running out of memory. Heavy libraries are imported late."""
