"""A whole run built of layers: one micro-step and its peak, the tape of load and steps, the estimate of a recipe."""
