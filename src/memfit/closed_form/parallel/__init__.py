"""What one GPU holds of a run that is spread over several: shares, buckets, gathered weights."""
