"""What each part of a model allocates, keeps for backward and needs there, transliterated from the libraries' own code."""
