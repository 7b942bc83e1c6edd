"""Policies chosen by name or given as objects: for a replay, for a server, for a sweep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard, TypeVar

from policies.batch.base import BatchPolicy, Policy, SingleStream
from policies.batch.engines import TensorRTLLM
from policies.core import DraftPolicy
from policies.from_file import Cut, file_of, is_file, load_file, said_cut
from policies.lengths.basic import Autoregressive, Fixed
from policies.lengths.rate_optimal import RateOptimal
from policies.registry import (
    PLAIN,
    POLICIES,
    AnyPolicy,
    as_bound,
    capped,
    describe,
    lacks,
    parse_policy,
    parse_serving_policy,
    policy_names,
    supplied,
)
from policies.rules.base import VerifyRule
from policies.rules.context import CSD
from policies.rules.memory import OnlineCorrectionMemory
from policies.rules.registry import parse_rule
from policies.spec import describe_spec, parameters
from traces.acceptance.trace import Trace
from traces.aliases import Say, silent
from traces.digits import counted
from traces.errors import DraftsimError
from traces.latency.table import LatencyTable
from traces.replay.run import can_replay
from traces.sources.methods import exact_policy, same_rule

Named = list[tuple[str, DraftPolicy]]
Policies = Sequence[str | Policy]
Text = TypeVar("Text")

FITTED = "rate-optimal"
"""The policy that is fitted to the recording and to the latencies before it runs."""
BATCHES = (1, 4, 16, 64)
"""Batch sizes that its rates are fitted at."""
DEFAULT = ("autoregressive", "fixed:gamma=1", "fixed:gamma=4", "gammatune")
"""Policies served where none is named: those that read no signal run in any engine."""
LENGTHS = ("fixed:gamma=2", "fixed:gamma=4")
"""Fixed draft lengths among all policies."""
UNPRICED = {
    "llamacpp": "llama.cpp's draft model also reads every verified batch, which is not priced here "
    "(`draftsim tune --engine llamacpp` does)",
    "tensorrt-llm": "K = 0 is priced with a draft pass, as in vLLM; TensorRT-LLM may skip it",
}
"""Parts of an engine's work under its settings that serving does not price."""
LONGEST = 12
"""Longest fixed draft length swept by default."""


def load_policies(
    texts: Policies | None,
    trace: Trace,
    *,
    signals: frozenset[str] | None = None,
    max_gamma: int | None = None,
    say: Say = silent,
    lacking: dict[str, DraftPolicy] | None = None,
    latency: LatencyTable | None = None,
) -> Named:
    """Return (name, policy) of each text or object; no text or ``all`` means all policies.

    A named method of the draft model with lossless verification keeps its name.  ``all`` leaves out
    policies that read signals which the trace lacks: they are added to `lacking` if it is given,
    else `say` is called with a remark.  ``signals`` and ``max_gamma`` are those of another draft
    source, by default the trace's own.  With `latency`, policies are `informed` of its costs.
    Raises DraftsimError naming the text that is wrong.
    """
    names = list(texts or ["all"])
    every = "all" in names
    have = trace.signals if signals is None else signals
    limit = trace.max_gamma if max_gamma is None else max_gamma
    if every:
        names = [*(n for n in names if n != "all"), *policy_names("single")]
    chosen: dict[str, Policy] = {}
    absent: dict[str, DraftPolicy] = {} if lacking is None else lacking
    for given in names:
        if (text := name_or_added(given, chosen, limit, say)) is None:
            continue
        try:
            own = exact_policy(text)
            policy = parse_policy(own, max_gamma=limit)
        except ValueError as error:
            raise DraftsimError(str(error)) from None
        implied = every and text in policy_names("single")
        if implied and not set(policy.reads) <= have:
            absent[text] = policy
            continue
        if implied and not (signals or can_replay(trace, policy)):
            continue
        chosen.setdefault(text if own != text else describe(policy), policy)
    if lacking is None:
        say_left_out(absent, have, say)
    found = []
    for name, served in chosen.items():
        one = SingleStream(served) if isinstance(served, BatchPolicy) else served
        unbounded = type(served) not in POLICIES.values() and not one.longest_draft()
        if one is not served and limit is not None and unbounded:
            one = Cut(one, limit)
        if latency is not None:
            one = informed(name, one, trace, latency, say)
        found.append((name, one))
    return found


def informed(
    name: str, policy: AnyPolicy, trace: Trace, latency: LatencyTable | None, say: Say
) -> AnyPolicy:
    """Return a shipped `policy` with the costs and the estimates that it needs and was not given.

    Costs are those of `latency`; None: it keeps none.  A policy that decides for a whole batch gets
    estimates of acceptance fitted to `trace`, and `say` is told so.
    """
    from simulator.pricing import extras_of
    from simulator.serving import TableCost
    from simulator.whatif.rate import fit_estimates

    if latency is not None and lacks(policy, "cost"):
        policy = supplied(policy, cost=TableCost(latency, extras_of(sampling=trace.sampling)))
    if isinstance(policy, BatchPolicy | SingleStream) and lacks(policy, "estimator"):
        say(f"{name}: its estimates of acceptance are fitted to this recording")
        estimator = fit_estimates(trace, "isotonic", trace.max_gamma or 8)[0]
        policy = supplied(policy, estimator=estimator)
    return policy


def name_or_added(
    text: str | Policy, chosen: dict[str, Policy], limit: int | None, say: Say,
    ready: Callable[[str, Policy], Policy] = lambda _, policy: policy,
) -> str | None:  # fmt: skip
    """Return the name of a shipped policy; None for others, which are added to `chosen`.

    Those are objects, each made `ready`, and classes in files.  Their longest drafts are lowered
    to `limit` (`within`, `load_file`).  `say` is told which policy is cut.
    Raises DraftsimError if `text` is neither, or `chosen` has a class of another file under its
    name.
    """
    if isinstance(text, str) and not is_file(text):
        return text
    bound = None
    if isinstance(text, str):
        own = exact_policy(text)
        try:
            name, policy, cut = load_file(own, limit)
        except ValueError as error:
            raise DraftsimError(str(error)) from None
        name += text.strip().removeprefix(own)
        check_file(text, name, policy, chosen)
    else:
        policy, cut = within(text, limit)
        bound = policy.longest_draft()
        if repeats(policy, chosen):
            return None
        name = name_of(policy, chosen)
        policy = Cut(policy, cut) if cut and isinstance(policy, DraftPolicy) else policy
        policy = ready(name, policy)
    if cut is not None:
        say(said_cut(name, cut, "the recording's", bound))
    chosen[name] = policy
    return None


def check_file(text: str, name: str, policy: Policy, chosen: Mapping[str, Policy]) -> None:
    """Raise DraftsimError if `chosen` has a class of another file than `text` under its `name`."""
    if name in chosen and file_of(chosen[name]) != file_of(policy):
        raise DraftsimError(f"{text}: another file's policy has the name {name}: rename the file")


def within(policy: Policy, limit: int | None) -> tuple[Policy, int | None]:
    """Return an object's policy, and the length to cut its drafts at; None: it is not cut.

    Defaults of a shipped policy are lowered to `limit`.  Raises DraftsimError if it is no policy.
    """
    if not isinstance(policy, Policy):
        raise DraftsimError(
            f"{policy!r} is no policy: give a name, or an object whose class is a DraftPolicy or "
            "a BatchPolicy"
        )
    longest = policy.longest_draft()
    if limit is None or (longest is not None and longest <= limit):
        return policy, None
    lowered = policy
    with suppress(AttributeError, TypeError, ValueError):  # a parameter kept in another form
        lowered = capped(policy, limit)
    if type(policy) in POLICIES.values():
        return lowered, limit if lowered.longest_draft() is None else None
    # A user's object is cut instead: a new one would lack what was set after construction.
    by_default = lowered is not policy and isinstance(policy, DraftPolicy)
    return policy, limit if longest is None or by_default else None


def repeats(policy: Policy, chosen: Mapping[str, Policy]) -> bool:
    """Return True if `chosen` has the same shipped policy, under whatever name.

    A cost or an estimator has no text form, so policies that hold one never repeat another.
    """
    if type(policy) not in POLICIES.values():
        return False
    alike = (type(held) is type(policy) and describe(held) == describe(policy)
             for held in chosen.values())  # fmt: skip
    return any(alike) and not any(vars(policy).get(own) for own in ("cost", "estimator"))


def name_of(policy: Policy, taken: Collection[str]) -> str:
    """Return the name of a policy given as an object: its text form, or its class and parameters.

    A number is appended if the name is in `taken`.
    """
    name = type(policy).__name__
    if type(policy) in POLICIES.values():
        name = describe(policy)
    else:
        with suppress(AttributeError, ValueError):  # a parameter kept in another form
            name = describe_spec(policy, name)
        name = as_bound(policy, name)
    alike = sum(other == name or other.startswith(f"{name} (") for other in taken)
    return f"{name} ({alike + 1})" if alike else name


def say_left_out(lacking: Mapping[str, Policy], have: Collection[str], say: Say) -> None:
    """Remark to `say` which policies were left out, and which of their signals `have` lacks."""
    if lacking:
        missing = sorted({s for policy in lacking.values() for s in policy.reads} - {*have})
        say(
            f"left out: {', '.join(lacking)}; not recorded: {', '.join(missing)} (record again "
            "with `draftsim profile`)"
        )


def named(chosen: Named) -> Named:
    """Return `chosen`; a fixed policy with default draft length gets the length in its name."""
    return [
        (f"fixed:gamma={p.gamma}" if isinstance(p, Fixed) and name == "fixed" else name, p)
        for name, p in chosen
    ]


def swept_policies(
    texts: Sequence[str] | None, gammas: Sequence[int], trace: Trace, say: Say = silent
) -> dict[str, DraftPolicy]:
    """Return the policies of a sweep, with values in braces expanded.

    Without `texts` they are the fixed lengths up to `LONGEST` and the oracle.  Each of `gammas`
    becomes the draft length of every policy that has one.  `say` is told what is not fitted.
    """
    from simulator.whatif.axes import expand, with_gammas

    for one in texts or ():
        if not isinstance(one, str):
            raise DraftsimError(
                f"a sweep takes policies by name, not {one!r}: name a class of your own as "
                "FILE.py:Class"
            )
    longest = min(LONGEST, trace.max_gamma or LONGEST)
    names = expand(texts or (f"fixed:gamma={{1..{longest}}}", "oracle"))
    if gammas:
        if "all" in names:
            every = [name for name, _ in load_policies(None, trace, say=say)]
            names = [n for n in names if n != "all"] + every
        names = with_gammas(names, list(gammas))
    chosen = named(load_policies(names, trace, say=say))
    say_unfitted(chosen, say)
    return {name: informed(name, policy, trace, None, say) for name, policy in chosen}


def is_unfitted(policy: object) -> TypeGuard[RateOptimal]:
    """Return True if this is the rate-optimal rule, and nothing is fitted to a recording."""
    return type(policy) is RateOptimal and policy.cost is None


def is_default(policy: object) -> TypeGuard[RateOptimal]:
    """Return True if this is the rate-optimal rule with its defaults, except its longest draft.

    A subclass is its user's own rule, which no shipped one may replace.
    """
    if type(policy) is not RateOptimal:
        return False
    settings = {k: p.default for k, p in parameters(RateOptimal).items() if k != "gamma_max"}
    return all(getattr(policy, key) == value for key, value in settings.items())


def say_unfitted(chosen: Named, say: Say) -> None:
    """Remark to `say` which of the policies is ``rate-optimal``, and not fitted."""
    for name, policy in chosen:
        if is_unfitted(policy):
            say(f"{name} is not fitted: it runs with its default estimates and costs")


def _is_unpriced(policy: Policy, largest: int) -> bool:
    """Return True if `UNPRICED` concerns a policy of its engines, for batches up to `largest`."""
    if not isinstance(policy, TensorRTLLM):
        return True
    schedule = {int(batch): k for batch, k in (policy.schedule or {}).items()}
    return largest > max(schedule) or any(k == 0 for b, k in schedule.items() if b <= largest)


def load_rule(text: str | None, memory: Path | None = None) -> VerifyRule | None:
    """Return the rule that `text` describes; None if none is named.

    ``memory`` is the file of a calibrated memory, which by itself means the rule csd.  Raises
    DraftsimError naming what is wrong.
    """
    if text is None and memory is None:
        return None
    text = text or "csd"
    try:
        table = None if memory is None else OnlineCorrectionMemory.load(memory)
        rule = parse_rule(text, memory=table)  # a run tells the rule its vocabulary
    except ValueError as error:
        raise DraftsimError(str(error)) from None
    if memory is not None and not isinstance(rule, CSD):
        raise DraftsimError(f"--memory belongs to a rule that has one, not {text!r}: --verify csd")
    return rule


def one_rule(
    texts: Sequence[Text] | None, verify: str | None, say: Say = silent
) -> tuple[Sequence[Text] | Sequence[str] | None, str | None]:
    """Return policies and rule for who verifies all policies alike.

    Methods that have one lossy rule in common give it (`traces.sources.methods.same_rule`).
    """
    given = [text for text in texts or () if isinstance(text, str)]
    if not given or len(given) < len(texts or ()):
        return texts, verify
    policies, rule = same_rule(given, verify)
    if rule != verify:
        pairs = zip(given, policies or (), strict=True)
        parts = [f"{text} is {own}" for text, own in pairs if text != own]
        say(f"{', '.join(parts)}, verified by {rule}")
    return policies, rule


def every_policy() -> list[str]:
    """Return the policies of ``all`` for a server: all that an engine could run."""
    # Only a recording knows what the oracle asks.
    plain, *others = (name for name in policy_names() if name not in ("oracle", "fixed"))
    return [plain, *LENGTHS, *others]


def load_serving_policies(
    texts: Policies | None,
    trace: Trace,
    latency: LatencyTable,
    mode: str = "continuous",
    settings: Path | None = None,
    largest: int = 1,
    say: Say = silent,
) -> dict[str, Policy]:
    """Return policies by name; no text means `DEFAULT`, ``all`` means `every_policy`.

    Policies are `informed` of the costs of the table, and ``rate-optimal`` is `fitted_as_asked`.
    Policies of ``all`` or the default are left out if the trace lacks their signals, the mode does
    not fit, or neither they nor the trace have a longest draft: `say` is told which, and why.  A
    file of `settings` is one more policy with the file's name, for batches up to `largest`; without
    texts it is served next to
    `simulator.tune.served.rivals`.
    Raises DraftsimError naming what is wrong with a text.
    """
    from simulator.tune.costs import longest_draft
    from simulator.tune.formats import read_settings
    from simulator.tune.served import rivals

    asked = [t for t in texts or () if t != "all"]
    implied = DEFAULT if not texts else every_policy() if "all" in texts else ()
    chosen: dict[str, Policy] = {}
    absent: dict[str, Policy] = {}
    out: dict[str, list[str]] = {}
    if settings is not None:
        engine, chosen[settings.name] = read_settings(settings)
        if engine == "off":
            say(f"{settings} is null: it means decoding without speculation")
        if engine in UNPRICED and _is_unpriced(chosen[settings.name], largest):
            say(f"{settings}: {UNPRICED[engine]}")
        if engine == "hf" and largest > 1:
            raise DraftsimError(
                f"{settings}: assisted generation of transformers decodes one request at a time: "
                "use --batch 1, or --max-batch 1 with --rate or --arrivals"
            )
        if not texts:
            return with_plain({**chosen, **rivals(longest_draft(trace))})

    def ready(name: str, policy: Policy, say: Say = say) -> Policy:
        if type(policy) is RateOptimal:
            return fitted_as_asked(name, policy, trace, latency)
        return informed(name, policy, trace, latency, say)

    def as_given(name: str, policy: Policy) -> Policy:
        # An object with parameters of its own is served as it is: its rate has its units.
        own = type(policy) is RateOptimal and not is_default(policy)
        return policy if own else ready(name, policy)

    for given in [*asked, *implied]:
        if (text := name_or_added(given, chosen, trace.max_gamma, say, as_given)) is None:
            continue
        try:
            made: Policy = parse_serving_policy(exact_policy(text), max_gamma=trace.max_gamma)
        except ValueError as error:
            raise DraftsimError(str(error)) from None
        if text not in asked and trace.max_gamma is None and made.longest_draft() is None:
            say(f"left out: {text}, which sets no longest draft: name it as {text}:gamma_max=8")
            continue
        said: list[str] = []
        made = ready(text, made, said.append)
        reason = "" if text in asked else _unserved(made, trace, mode)
        if reason:
            out.setdefault(reason, []).append(text)
        elif text not in asked and not set(made.reads) <= trace.signals:
            absent[text] = made
        else:
            # A length left at its default is in the name all the same.
            name = f"fixed:gamma={made.gamma}" if text == "fixed" else text  # type: ignore[union-attr]
            if name not in chosen:
                chosen[name] = made
                for line in said:
                    say(line)
    say_left_out(absent, trace.signals, say)
    for reason, left_out in out.items():
        say(f"left out: {', '.join(left_out)}; {reason}")
    return with_plain(chosen)


def _unserved(policy: Policy, trace: Trace, mode: str) -> str:
    """Return why a `mode` of serving a trace cannot run a policy, signals aside; "" if it can."""
    batched = mode in ("continuous", "static")
    if isinstance(policy, BatchPolicy) and not batched:
        return f"--mode {mode} takes policies per request"
    if trace.max_gamma is not None and (policy.longest_draft() or 0) > trace.max_gamma:
        # No table's lengths are lowered.
        return f"the recording holds drafts of at most {counted(trace.max_gamma, 'token')}"
    if isinstance(policy, BatchPolicy) or not set(policy.reads) <= trace.signals:
        return ""
    return "" if can_replay(trace, policy) else "the recording's vocabulary is not known"


def fitted_as_asked(
    text: str, policy: RateOptimal, trace: Trace, latency: LatencyTable
) -> RateOptimal:
    """Return the rate-optimal `policy` that `text` describes, for a server.

    It is fitted, up to its ``gamma_max``, unless it has a cost.  A rate of its own stays, in tokens
    per second of `latency`.  Raises DraftsimError if another parameter is set.
    """
    from simulator.pricing import extras_of
    from simulator.serving import TableCost

    if policy.cost is not None:
        return policy
    if is_default(policy):
        return fitted(trace, latency, policy.gamma_max)
    known = parameters(RateOptimal)
    if policy.rate == known["rate"].default:
        raise DraftsimError(f"{text}: this command fits it, so only gamma_max can be set")
    cost = TableCost(latency, extras_of(sampling=trace.sampling))
    return RateOptimal(**{**{k: getattr(policy, k) for k in known}, "cost": cost})


def fitted(trace: Trace, latency: LatencyTable, longest: int | None = None) -> RateOptimal:
    """Return the rate-optimal policy for a server, fitted to a recording and to latencies.

    It has a rate for each of `BATCHES`, or for one request if the latencies hold no other batch;
    ``longest`` bounds its drafts.
    """
    from simulator.whatif.rate import fit_rate_optimal

    sizes = BATCHES if latency.knows_batches or latency.batch_free else (1,)
    return fit_rate_optimal(trace, latency, gamma_max=longest, batches=sizes).policy


def with_plain(chosen: dict[str, Policy]) -> dict[str, Policy]:
    """Return the policies with no speculation first, which speedups are over."""
    # A subclass may draft, so it is no baseline.
    plain = {n: p for n, p in chosen.items() if type(p) is Autoregressive}
    return {**(plain or {PLAIN: Autoregressive()}), **chosen}
