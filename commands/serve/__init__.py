"""``draftsim serve``."""
