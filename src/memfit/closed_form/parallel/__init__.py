"""One GPU's part of a run on several: shares, buckets, gathered weights."""
