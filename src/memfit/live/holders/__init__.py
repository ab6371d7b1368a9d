"""Who holds a tensor: what is alive, the names and objects that lead to it, and the line that stored it."""
