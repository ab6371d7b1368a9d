"""The catalogue: published config.json files and an index of their names and exact parameter counts (package data)."""
