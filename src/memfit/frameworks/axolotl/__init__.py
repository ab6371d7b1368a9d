"""axolotl's YAML: keys and defaults of 0.19."""
