"""The parts of commands that run a real serving engine."""
