"""Scrapes of a server's ``/metrics`` (Prometheus text format), a module for each server's names."""
