"""Latencies that other programs measured, made into tables that every command reads."""
