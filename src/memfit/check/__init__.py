"""A repository's jobs, judged from a cache and compared with another commit."""
