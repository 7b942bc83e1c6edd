"""``draftsim validate``."""
