"""What runs on the device: models, their caches, their passes, and how they are loaded."""
