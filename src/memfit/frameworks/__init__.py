"""Other tools' files, read into a recipe and written from a plan: one folder a framework."""
