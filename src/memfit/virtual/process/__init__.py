"""The process around the card: its host memory, its files, its imports, what torch.load places."""
