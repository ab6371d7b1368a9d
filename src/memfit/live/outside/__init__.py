"""A command watched from outside while it runs."""
