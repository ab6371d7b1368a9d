"""Find who holds a tensor, in two directions that share names, paths, lines and the test for the user's own files.

`names` lists a program's variables and writes paths, `source` finds the line that stores into a name, `objects` and
`live_tensors` list what objects contain. With these `retained` measures what each name keeps (for an out-of-memory),
and `referrers` finds the name that keeps a given tensor (for a leak).
"""
