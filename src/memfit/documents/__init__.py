"""The file formats memfit reads and writes: JSON documents, tapes, snapshots, recipe.toml, the log of a watch."""
