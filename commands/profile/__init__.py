"""``draftsim profile``."""
