"""Who holds a tensor, searched in two directions over one idea of names, paths, lines and the user's own files.

`names` says which variables a program has and how a path is written, `source` finds the line that stores into one,
`objects` and `live_tensors` say what objects contain. With these `retained` measures what each name keeps (for an
out-of-memory), and `referrers` finds the name that keeps a given tensor (for a leak).
"""
