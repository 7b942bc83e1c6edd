"""Recorded acceptance and latency: what was measured, and its clock-free replay."""

__distribution__ = "draftsim"
