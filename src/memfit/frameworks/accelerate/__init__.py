"""accelerate's launcher file, accelerate.yaml: read, written, and as the environment of a process."""
