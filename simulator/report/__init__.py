"""One self-contained HTML page about a run, to hand to a colleague."""

from simulator.report.data import report_data
from simulator.report.page import build_report, render, write_report

__all__ = ["build_report", "render", "report_data", "write_report"]
