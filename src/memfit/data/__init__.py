"""The training file: `files` reads records, `samples` finds their text, `tokens` counts it, `dataset` sums it up."""
