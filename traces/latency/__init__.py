"""What every step of decoding took, and how it is read between the measured points."""
