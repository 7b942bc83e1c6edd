"""Finished units of a stage, and what the folder holds from earlier runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from policies.json_text import parse_json
from profiler.recording.checkpoint import Checkpoint
from profiler.suite.account import Account
from profiler.suite.environment import Workplace, clocks, write_results
from traces.errors import DraftsimError

Unit = dict[str, Any]


class Ledger:
    """Finished units of a stage, so that a stopped one goes on with the next.

    `units` are all of the stage's: those `earlier` found in its folder, those of a stopped run,
    and those finished now.  Raises DraftsimError if the folder holds a stopped run with other
    settings.
    """

    def __init__(
        self, place: Workplace, stage: str, settings: Mapping[str, Any],
        earlier: Mapping[str, Unit] | None = None,
    ) -> None:  # fmt: skip
        self.place, self.stage = place, stage
        self._kept = Checkpoint(place.work / stage, {**settings, "meta": place.meta()})
        read = {name: self._read(name) for name in self._kept.names()}
        self._own = {name: unit for name, unit in read.items() if unit is not None}
        self.units: dict[str, Unit] = {**(earlier or {}), **self._own}

    def _read(self, name: str) -> Unit | None:
        kept = self._kept.get(name)
        return None if kept is None else parse_json(str(kept["unit"]))

    def get(self, name: str) -> Unit | None:
        """Return what a unit left when it was finished before, or None."""
        return self._own.get(name)

    def put(self, name: str, unit: Unit) -> None:
        """Keep a finished unit."""
        self.units[name] = self._own[name] = unit
        self._kept.put(name, {"unit": np.array(json.dumps(unit, default=float))})

    def write(self, account: Account, begun: Mapping[str, str], key: str, about: Any) -> None:
        """Write the stage's JSON: its units but for their rows, which are filed under `key`.

        ``begun``: the clocks (`clocks`) when it began; ``about``: the kernels that ran.
        """
        place = self.place
        units = {
            name: {k: v for k, v in unit.items() if k != key} for name, unit in self.units.items()
        }
        write_results(
            place.out / f"{self.stage}.json",
            {
                "stage": self.stage, "meta": place.meta(), **account.summary(), "kernels": about,
                "clocks": [begun, clocks(place.device)], "units": units,
            },
        )  # fmt: skip

    def close(self, account: Account) -> None:
        """The stage ends: forget its pieces, unless some of it is left, be it other pairs'."""
        left = [*account.failed, *account.late]
        if not left and not any(unit.get("unfinished") for unit in self._own.values()):
            self.place.forget(self.stage)
        elif left:
            what = "failed or came too late" if account.failed else "came too late"
            self.place.say(
                f"{len(left)} parts {what}, from {left[0]} on: the same command on this machine "
                "goes on with them"
            )


def earlier_units(
    place: Workplace, path: Path, again: Callable[[str], bool],
    rows: Callable[[], Mapping[str, list[list[Any]]]], key: str,
) -> dict[str, Unit]:  # fmt: skip
    """The units of a stage's results that lie in its folder, but those to be measured `again`.

    ``path`` is the stage's JSON; ``rows`` reads what of each unit is in its table, filed under
    ``key``.

    Raises
    ------
    DraftsimError
        If they were measured with other settings, or a file is damaged: a folder is of one
        device, dtype and set of library versions.
    """
    if not path.is_file():
        return {}
    try:
        document = parse_json(path.read_text())
        named: Collection[str] = [name for name in document["units"] if not again(name)]
        meta = document["meta"]
    except (ValueError, KeyError, TypeError) as error:
        raise DraftsimError(f"{path} is damaged ({error}): use another --out") from None
    if not named:
        return {}
    own = parse_json(json.dumps(place.meta()))
    if other := sorted(k for k in {*own, *meta} if own.get(k) != meta.get(k)):
        raise DraftsimError(
            f"{path} holds figures measured with another {', '.join(other)}: one --out holds one "
            "device and its settings; use another"
        )
    tabled = rows()
    return {name: {**document["units"][name], key: tabled.get(name, [])} for name in named}
