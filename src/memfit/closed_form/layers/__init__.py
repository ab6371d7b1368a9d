"""What each part of a model allocates, keeps for backward and needs there, after the libraries' own code."""
