"""``draftsim export``: a recording in a form that other programs read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.drafted import load_unpriced
from commands.common.options import DraftedOption, TraceOption
from commands.common.output import JsonOption, emit, note, placed_as
from traces.digits import counted, three_digits
from traces.store.recordings import DEFAULT_TRACE

if TYPE_CHECKING:
    from simulator.recording import Recording
    from traces.store.speculation_profile import SpeculationProfile


class Form(StrEnum):
    """Forms that can be written."""

    SPECULATION_PROFILE = "speculation-profile"


def export(
    what: Annotated[
        Form, typer.Argument(help="speculation-profile: NVIDIA's speculation_profile.json.")
    ],
    trace: TraceOption = DEFAULT_TRACE,
    source: DraftedOption = None,
    draft_length: Annotated[
        int | None, typer.Option(min=1, help="Default: the longest recorded, up to 8.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", callback=placed_as(b"{"), help="File to write."),
    ] = Path("speculation_profile.json"),
    json: JsonOption = None,
) -> None:
    """Write a recording's acceptance by position as a profile that other programs read."""
    from traces.store.speculation_profile import write_profile

    del what
    recording = load_unpriced(trace, source, "export")
    profile = profile_of(recording, draft_length)
    write_profile(profile, out)
    note(f"{recording.unpriced}: {headline(profile)}")
    rates = zip(profile.conditional, profile.marginal, strict=True)
    rows = [
        {"position": place, "alpha": alpha, "survival": survival}
        for place, (alpha, survival) in enumerate(rates, 1)
    ]
    emit("export", rows, json, title="Acceptance by position in the draft")
    if json is None:
        note(
            "alpha: chance that a token is accepted if those before it were; survival: chance that "
            "it and those before it are"
        )
    note(f"wrote {out}; commands read it as --trace, with --latency")


def headline(profile: SpeculationProfile) -> str:
    """Return the acceptance length of a profile in words, and what it is the mean of."""
    conditions = profile.conditions
    rounds = counted(conditions["rounds"], "round")
    short = conditions["rounds_left_out"]
    left_out = f" ({counted(short, 'round')} cut by a request's end left out)" if short else ""
    return (
        f"acceptance length {three_digits(profile.mean_length)} at draft length "
        f"{profile.longest}, from {rounds} of {counted(conditions['requests'], 'request')}"
        f"{left_out}"
    )


def profile_of(recording: Recording, k: int | None = None) -> SpeculationProfile:
    """Return the profile of a recording at draft length `k`, by default its longest up to 8.

    Rounds that a request's end cut are left out.  A position for which a lookup proposed nothing
    counts as rejected.
    Raises DraftsimError if no round can draft `k` tokens, or if such drafts were not recorded.
    """
    import numpy as np

    from commands.common.drafted import LONGEST
    from simulator.aggregate.positions import judged, of_trace
    from simulator.tune.launch import METHODS
    from traces.errors import DraftsimError
    from traces.store.identity import model_label
    from traces.store.speculation_profile import SpeculationProfile

    trace = recording.trace
    if k is not None and trace.max_gamma is not None and k > trace.max_gamma:
        raise DraftsimError(
            f"--draft-length {k}: {recording.name} has drafts of up to "
            f"{counted(trace.max_gamma, 'token')}: lower it, or profile with a larger --max-gamma"
        )
    longest = k or min(trace.max_gamma or LONGEST, LONGEST)
    log = of_trace(recording.name, trace, longest).log
    assert log is not None
    whole = judged(trace, log, longest) == longest
    if not whole.any():
        raise DraftsimError(
            f"no round of {recording.name} drafts {counted(longest, 'token')}: see --draft-length"
        )
    accepted = log.rounds["accepted"][whole]
    of = log.rounds["request"][whole]
    histogram = np.bincount(accepted, minlength=longest + 1)
    marginal = histogram[::-1].cumsum()[::-1][1:] / histogram.sum()
    names = np.array([request.category for request in trace.requests])[of]
    categories = {
        str(name): {
            "mean_accept_length": round(1 + float(accepted[names == name].mean()), 6),
            "num_steps": int((names == name).sum()),
        }
        for name in np.unique(names)
    }
    means = [1 + accepted[of == i].mean() for i in np.unique(of)]
    meta = recording.drafter
    kind = str(meta.get("kind", "draft-model" if recording.source is None else trace.source))
    drafter = model_label(recording.models.get("draft", {}))
    conditions = {
        "recording": recording.name, "requests": len(trace.requests),
        "temperature": trace.temperature, "rounds": int(histogram.sum()),
        "rounds_left_out": int((~whole).sum()), "tool": "draftsim export speculation-profile",
    }  # fmt: skip
    return SpeculationProfile(
        marginal.tolist(), histogram.tolist(), METHODS.get(kind, kind),
        drafter or None if recording.source is None else trace.source,
        model_label(recording.models.get("target", {})) or None, conditions, categories,
        float(np.mean(means)),
    )  # fmt: skip
