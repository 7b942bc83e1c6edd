"""Other draft sources for real: recorded, trained, timed and decoded with."""
