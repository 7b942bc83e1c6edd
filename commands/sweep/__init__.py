"""``draftsim sweep``."""
