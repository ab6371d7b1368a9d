"""Published rows run by their frameworks' own code on the virtual GPU: one driver per framework."""
