"""Predictions from totals: tokens a second and acceptance of whole runs, without a trace."""
