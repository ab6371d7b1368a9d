"""A user's own script on the card: how it is started, what it loads, when it has trained enough."""
