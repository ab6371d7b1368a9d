"""A whole run built from layers: one micro-step, its peak, the tape of load and steps, and the estimate of a recipe."""
