"""What a recorded or watched history shows of its cause: who was alive, since when, and who kept it."""
