"""Clues from the text of a failed run: signs, numbers of messages, arithmetic and settings."""
