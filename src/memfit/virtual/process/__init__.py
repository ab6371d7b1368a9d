"""The process around the card: its host memory and its files."""
