"""``draftsim simulate``."""
