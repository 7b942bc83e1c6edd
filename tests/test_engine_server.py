"""A server around the engine: what is told of its notes and of its answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands.engine.options import named_loads
from policies import parse_policy
from policies.core import Round
from profiler.engines import session
from profiler.engines.drafts import Asked, Forced
from profiler.engines.notes import Lines, LogReader
from profiler.engines.served import Reply, served_run
from profiler.engines.vllm.proposer import Proposer
from profiler.engines.vllm.watch import NoteTaker, caller_name
from simulator.engines import priced
from simulator.pricing import scalar_seconds
from simulator.served import added, control_sizes, slowdown_of, slowed, with_server
from simulator.serving.cost import EngineCost
from tests.pretend_vllm import PretendRunner, config
from tests.serving import GRID
from traces.acceptance.synthetic import synthetic_trace
from traces.errors import DraftsimError, FileError
from traces.latency.table import LatencyTable
from traces.replay.run import replay
from traces.store.engine_runs import Decoded, EngineStep, PromptRead, ServedRun

TRACE = synthetic_trace(0.7, requests=5, tokens=20, concentration=5.0, prompt_length=9, seed=2)
TEXTS = {i: [(7 * i + 3 * k) % 97 for k in range(20)] for i in range(5)}
PROMPTS = {i: [5, 6, 7] for i in range(5)}


@pytest.mark.parametrize(
    ("name", "own"),
    [("3/0-0123abcd", "3/0"), ("cmpl-3/17-0-0123abcd", "3/17"), ("a-b-1-2", "a-b-1"), ("x", "x")],
)
def test_requests_are_called_as_their_callers_call_them(name: str, own: str) -> None:
    assert caller_name(name) == own


def note(folder: Path, **line: Any) -> None:
    with (folder / "1.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def stepped(
    folder: Path, start_s: float, seconds: float, ran_s: float, prompts: list[Any],
    decoded: list[Any], finished: list[str], left: int,
) -> None:  # fmt: skip
    parts = {"schedule": 0.001, "execute": 0.0, "sample": 0.0, "propose": 0.0, "update": 0.001,
             "output": seconds - 0.002}  # fmt: skip
    emitted = {p[0]: 1 for p in (*prompts, *decoded)}
    step = EngineStep(start_s, seconds, parts, decoded, prompts, emitted, finished)
    note(folder, step=vars(step), left=left)
    # Of a process of its own, whose notes may come first or last.
    with (folder / "2.jsonl").open("a") as file:
        file.write(json.dumps({"ran": start_s + 0.001, "seconds": ran_s}) + "\n")


@pytest.fixture
def one_request(tmp_path: Path) -> Any:
    """Two iterations of one request: 2 ms to the engine, 1 ms to wake up, 3 ms back."""
    note(tmp_path, engine={"blocks": 10, "block_size": 16, "vocabulary": 97, "device": "cpu"})
    note(tmp_path, queued="0/0", at=10.002)
    stepped(tmp_path, 10.003, 0.020, 0.015, [["0/0", 9, 0, 9]], [], [], 1)
    stepped(tmp_path, 10.024, 0.010, 0.006, [], [["0/0", 10, 0, 1]], ["0/0"], 0)
    note(tmp_path, rounds="0/0", of=[[1, 0, 0, 1, 0, 1]])
    answer = Reply("0/0", 0, 10.0, [4, 4], [(10.024, 1), (10.037, 1)])
    reader = LogReader(tmp_path)
    log = reader.take(["0/0"])
    return SimpleNamespace(reader=reader, log=log, run=served_run([answer], log, 0.01))


def test_what_is_around_a_request_and_its_iterations_adds_up(one_request: Any) -> None:
    run = one_request.run
    assert one_request.reader.engine["blocks"] == 10
    assert run.load.rounds == {"0/0": [Round(1, 0, 0, 1, 0, 1)]}
    assert run.around_request_s == pytest.approx([0.002 + 0.001 + 0.003])
    # 3 ms of messages in the first, and 1 ms to the next; after the last the engine is idle.
    assert run.around_step_s == pytest.approx([0.003 + 0.001, 0.002])
    assert [s.seconds for s in run.load.steps] == pytest.approx([0.021, 0.010])
    [request] = run.load.requests.to_dict("records")
    assert request["first_s"] == pytest.approx(0.024)
    told = added(run, GRID)
    assert told["share"] == pytest.approx((0.006 + 0.006) / 0.037)
    inside = sum(s.parts[p] for s in run.load.steps for p in ("schedule", "execute", "update"))
    assert inside + sum(run.around_step_s) + sum(run.around_request_s) == pytest.approx(0.037)


def test_waiting_for_an_iteration_under_way_is_not_the_servers(tmp_path: Path) -> None:
    note(tmp_path, queued="0/0", at=10.0)
    note(tmp_path, queued="1/1", at=10.010)
    stepped(tmp_path, 10.0, 0.020, 0.015, [["0/0", 9, 0, 9]], [], [], 2)
    both = [["0/0", 10, 0, 1]]
    stepped(tmp_path, 10.021, 0.010, 0.006, [["1/1", 9, 0, 9]], both, ["0/0", "1/1"], 0)
    answers = [
        Reply("0/0", 0, 10.0, [4, 4], [(10.021, 1), (10.032, 1)]),
        Reply("1/1", 1, 10.006, [4], [(10.033, 1)]),
    ]
    run = served_run(answers, LogReader(tmp_path).take(["0/0", "1/1"]), 0.01)
    assert run.around_request_s == pytest.approx([0.001, 0.004 + 0.002])


def test_a_control_load_becomes_cells_less_what_the_table_holds(one_request: Any) -> None:
    known = LatencyTable(GRID.cells, {"host_parts": [{"batch": 1, "output_s": 0.0005}]})
    table = with_server(known, {1: [one_request.run]})
    assert table.seconds("server", "request", batch=1, new_tokens=1, context=0) == pytest.approx(
        0.006
    )
    assert table.seconds("server", "iteration", batch=1, new_tokens=1, context=0) == pytest.approx(
        0.002 - 0.0005
    )
    assert len(table.cells) == len(GRID.cells) + 3
    with pytest.raises(DraftsimError, match="hold a server's share"):
        with_server(table, {1: [one_request.run]})


def control_of(
    table: LatencyTable, size: int, slower: float, prompts_slower: float, queued: list[float]
) -> ServedRun:
    """A loop of `size` requests in an engine that takes so much longer than `table` says."""
    cost = EngineCost(table)
    prompt = [PromptRead("0/0", 40, 0, 40)]
    steps = []
    for context in range(60, 90, 10):
        decoded = [Decoded(f"{i}/{i}", context, 0, 1) for i in range(size)]
        for reading in ([], prompt):
            step = EngineStep(0.0, 0.0, {}, decoded, reading, {}, [])
            own_s = (prompts_slower if reading else slower) * priced(step, cost).total_s
            parts = {"schedule": 1e-4, "execute": own_s - 2e-4 - 5e-4, "update": 1e-4}
            steps.append(replace(step, seconds=own_s + 2e-3, parts=parts))
    load: Any = SimpleNamespace(steps=steps)
    return ServedRun(load, [0.006] * 3, [2e-3 + 5e-4] * len(steps), queued)


def test_an_engine_slower_than_its_table_is_priced_as_its_control_loops_ran() -> None:
    table = LatencyTable(
        GRID.cells, {"host_parts": [{"batch": b, "output_s": 5e-4} for b in (1, 8)]}
    )
    controls = {1: [control_of(table, 1, 1.3, 1.2, [0.0])],
                8: [control_of(table, 8, 1.1, 1.2, [0.0, 2e-3, 4e-3, 6e-3, 8e-3, 9e-3, 0.011,
                                                    0.014])]}  # fmt: skip
    speed = slowdown_of(controls, table)
    assert speed.decoding == pytest.approx({1: 1.3, 8: 1.1})
    assert speed.prompts == pytest.approx(1.2)
    assert speed.at(16) == pytest.approx(1.1)
    now = slowed(table, speed)
    cost, before = EngineCost(now), EngineCost(table)
    for size, slower in ((1, 1.3), (8, 1.1)):
        decoding = controls[size][0].load.steps[0]
        # The host's share, a twentieth, has cells of one request alone.
        expected = slower * priced(decoding, before).total_s
        assert priced(decoding, cost).total_s == pytest.approx(expected, rel=0.02)
    alone = EngineStep(0.0, 0.0, {}, [], [PromptRead("0/0", 40, 0, 40)], {}, [])
    assert priced(alone, cost).total_s == pytest.approx(
        1.2 * priced(alone, before).total_s, rel=0.03
    )
    # The server's share was measured together with that very engine.
    served = with_server(now, controls)
    around = {"batch": 8, "new_tokens": 1, "context": 0}
    assert served.seconds("server", "iteration", **around) == pytest.approx(2e-3)
    assert served.seconds("server", "apart", **around) == pytest.approx(2e-3)
    assert scalar_seconds(served, "server", "apart", 1) == 0
    again = slowed(served, speed)
    assert again.seconds("server", "iteration", **around) == pytest.approx(2e-3)


def test_controls_are_the_ends_of_the_loads() -> None:
    assert control_sizes(named_loads("closed:1,4,8", None), 16) == [1, 8]
    assert control_sizes(named_loads("closed:4", None), 16) == [4]
    assert control_sizes(named_loads(None, "0.5"), 16) == [1, 4]
    assert control_sizes(named_loads("closed:8", "0.5"), 2) == [1, 8]


class Core:
    """As much of vLLM's engine core as a recorder looks at: one request, decoded in one step."""

    def __init__(self) -> None:
        request = SimpleNamespace(num_tokens=4, num_computed_tokens=4, num_prompt_tokens=3)
        plan = SimpleNamespace(num_scheduled_tokens={"cmpl-0/0-0-ab": 1},
                               total_num_scheduled_tokens=1)  # fmt: skip
        self.scheduler = SimpleNamespace(
            requests={"cmpl-0/0-0-ab": request}, schedule=lambda: plan,
            update_from_output=lambda plan, output: None, get_num_unfinished_requests=lambda: 0,
        )  # fmt: skip
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
            model_config=SimpleNamespace(get_vocab_size=lambda: 97),
            device_config=SimpleNamespace(device_type="cpu"),
        )

    def step(self) -> tuple[dict[int, Any], bool]:
        plan = self.scheduler.schedule()
        sampled = SimpleNamespace(req_ids=["cmpl-0/0-0-ab"], sampled_token_ids=[[5]])
        self.scheduler.update_from_output(plan, sampled)
        output = SimpleNamespace(request_id="cmpl-0/0-0-ab", new_token_ids=[5], finished=True)
        return {0: SimpleNamespace(outputs=[output])}, True


def test_what_a_recorder_notes_is_read_back(tmp_path: Path) -> None:
    recorder = NoteTaker(Lines(tmp_path))
    recorder.queued("cmpl-0/0-0-ab")
    core = Core()
    outputs = recorder.step(core, Core.step)
    assert outputs[1]
    assert recorder.ran(lambda value: value + 1)(1) == 2
    log = LogReader(tmp_path).take(["0/0"], wait_s=5.0)
    [step] = log.steps
    assert [(d.name, d.drafted, d.emitted) for d in step.decoded] == [("0/0", 0, 1)]
    assert step.kind == "decode"
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert list(log.queued) == ["0/0"]
    assert log.queued["0/0"] < step.start_s


def test_an_engine_that_notes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DraftsimError, match=r"did not say within 0\.2 s"):
        LogReader(tmp_path).take(["0/0"], wait_s=0.2)


def test_forced_drafts_travel_in_files_and_a_changed_file_changes_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Forced(TRACE, TEXTS, 97).write(tmp_path)
    given = tmp_path / "setup.json"
    monkeypatch.setenv(session.VARIABLE, str(given))
    proposer = Proposer(config(4))
    for text in ("fixed:gamma=3", "gammatune", "autoregressive"):
        given.with_suffix(".new").write_text(
            json.dumps({"policy": text, "source": f"{session.FORCED}{place}"})
        )
        given.with_suffix(".new").replace(given)
        runner = PretendRunner(proposer, TEXTS, PROMPTS)
        outputs = runner.run()
        assert {n.partition("/")[0]: o for n, o in outputs.items()} == {
            str(i): t for i, t in TEXTS.items()
        }
        own = replay(TRACE, parse_policy(text, max_gamma=4)).rounds  # type: ignore[arg-type]
        assert sum(sum(i.values()) for i in runner.iterations) == int(own["drafted"].sum())


def test_forced_drafts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        Forced.read(tmp_path / "forced.json")
    given = json.dumps({"policy": "fixed", "source": f"{session.FORCED}{tmp_path / 'none.json'}"})
    with pytest.raises(DraftsimError, match="no such file"):
        session.setup_from(given, longest=4)
    path = Forced(TRACE, TEXTS, 97).write(tmp_path)
    source = Forced.read(path)
    drafts = source.open(Asked("2/5", [1], 20), TEXTS[2][:1])
    assert drafts.remaining == 19
