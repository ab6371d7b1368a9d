"""Train a plan, and recover when memory runs out. Heavy libraries are imported late."""
