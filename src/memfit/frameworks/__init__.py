"""Read other tools' files into a recipe and write them from a plan: one module per framework."""
