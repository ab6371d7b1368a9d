"""A user's own script on the card: as it is started, what it loads, when it has trained enough."""
