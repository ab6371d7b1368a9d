"""A model's name or config.json becomes an Architecture: families, the Hub, safetensors headers. No weight is read."""
