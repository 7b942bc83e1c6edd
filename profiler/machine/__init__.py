"""How quiet the machine is while it is timed; `traces.machine` says what the figures mean."""
