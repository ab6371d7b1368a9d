"""An out-of-memory beside the process that had it: which line allocated what, and which logits it failed at."""
