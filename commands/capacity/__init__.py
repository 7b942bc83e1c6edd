"""``draftsim capacity``."""
