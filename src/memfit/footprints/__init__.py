"""Footprints of traced and watched runs, the comparison of two footprints, and the band a prediction allows."""
