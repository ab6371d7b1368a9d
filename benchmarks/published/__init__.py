"""Published measurements of training runs, read from a CSV, and what memfit predicts for each."""
