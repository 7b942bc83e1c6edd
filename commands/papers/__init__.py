"""``draftsim papers``."""
