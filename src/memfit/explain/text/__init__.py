"""What the text of a failed run shows of its cause: signs, figures and settings."""
