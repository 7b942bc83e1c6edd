"""Public GPU measurements, each predicted from a part of it.

No constant is fitted to a row that it predicts: every row says what was given.  The form of
the acceptance family (`simulator.aggregate.acceptance`) and of the cycle line was chosen with
the RTX 3090 ladder in view, though, so that the ladder does not test the form; that reading and
arithmetic add up (`simulator.hardware.roofline`) with the 8B's passes in view, and tested by the
1B's.
"""

from pathlib import Path

from simulator.papers.measured.engines import (
    SERVER_LOG,
    engine_rows,
    ladder_rows,
    roofline_rows,
    server_rows,
)
from simulator.papers.measured.logs import log_rows
from simulator.papers.measured.operators import eagle_rows, operator_rows
from simulator.papers.measured.rows import Evidence


def measured_rows(logs: Path | None = None, named: str = "") -> list[Evidence]:
    """Return rows of studies whose name contains `named`, and of logs if their folder is given.

    Raises DraftsimError if there are no logs in it.
    """
    of_logs: list[Evidence] = []
    if logs:  # first, since they may be refused; a folder may hold the server's requests alone
        found = log_rows(logs, needed=not (logs / SERVER_LOG).is_file())
        of_logs = [*server_rows(logs), *eagle_rows(logs), *found]
    rows = [
        *ladder_rows(named), *engine_rows(), *roofline_rows(), *operator_rows(named), *of_logs
    ]  # fmt: skip
    return [row for row in rows if named.lower() in row.study.lower()]
