"""Reading ``speculation_profile.json`` as counts by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traces.importers.base import Options
from traces.importers.rows import only_file
from traces.importers.totals import Totals
from traces.store.speculation_profile import KEYS, read_profile


class SpeculationProfiles:
    """NVIDIA Model-Optimizer's ``speculation_profile.json``."""

    name = "speculation-profile"
    summary = "speculation_profile.json of NVIDIA's Model-Optimizer, or of `draftsim export`"
    takes: tuple[str, ...] = ()

    def sniff(self, text: str) -> bool:
        return any(f'"{key}"' in text for key in KEYS)

    def read(self, files: Sequence[Path], options: Options) -> Totals:
        del options
        path = only_file(self.name, files)
        profile = read_profile(path)
        meta = {
            "kind": self.name, "source": [path.name], "method": profile.method,
            "conditions": dict(profile.conditions),
        }  # fmt: skip
        if sum(profile.histogram):
            at_least = [sum(profile.histogram[k:]) for k in range(1, profile.longest + 1)]
            rounds = sum(profile.histogram)
            return Totals(
                rounds, rounds * profile.longest, sum(at_least), profile.longest, at_least,
                meta=meta,
            )  # fmt: skip
        # Means of an unknown number of rounds: rates stand where counts would.
        rates = list(profile.marginal)
        return Totals(None, profile.longest, sum(rates), profile.longest, rates, meta=meta)
