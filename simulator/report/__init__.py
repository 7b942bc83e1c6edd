"""One self-contained HTML page about a run, to hand to a colleague."""

from simulator.report.page import build_report, write_report

__all__ = ["build_report", "write_report"]
