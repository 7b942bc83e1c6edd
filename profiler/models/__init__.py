"""The models on the device: their caches, their passes, and how they are loaded."""
