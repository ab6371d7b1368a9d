"""Turn a model's name or config.json into an Architecture: families, Hub, safetensors headers; no weight is read."""
