"""The time of every step of decoding, and its interpolation between the measured points."""
