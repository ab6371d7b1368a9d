"""Model code and loops that only published measurements need; importing one registers it with the closed form."""
