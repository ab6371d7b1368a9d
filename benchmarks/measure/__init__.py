"""Training runs measured on a real GPU, kept as small files, and the same runs on the virtual GPU beside them."""
