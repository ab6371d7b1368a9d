"""LLaMA-Factory's YAML: keys and defaults of 0.9.5."""
