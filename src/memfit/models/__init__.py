"""From the name or config.json of a model to its Architecture: families, the Hub, safetensors headers. Weights are never read."""
