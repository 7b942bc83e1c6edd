"""Measurement of a real target/draft pair: latencies, acceptance traces, spot checks."""

__distribution__ = "draftsim"
