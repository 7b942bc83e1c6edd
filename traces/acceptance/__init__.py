"""The acceptance trace: what a draft proposes at every output position, checked and drawn."""
