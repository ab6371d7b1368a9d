"""The memory of a program that runs: watched against its prediction, its leaks named, an out-of-memory explained."""
