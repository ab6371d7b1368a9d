"""The parts of a model as the libraries run them: what each allocates, saves for backward and needs there."""
