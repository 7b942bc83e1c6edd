"""Code that a model wrote is run with limits, and nothing but its tests decides that it passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from profiler.checks import sandbox
from profiler.checks.sandbox import CodeVerdict, code_of, judge_code, run
from profiler.prompts import CodeTask
from traces.errors import DraftsimError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")

RIGHT = "def twice(x):\n    return 2 * x\n"
TESTS = "assert twice(2) == 4\nassert twice(-1) == -2"
TASK = CodeTask("twice", TESTS)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1\n", "x = 1\n"),
        ("x = 1<|im_end|>", "x = 1"),
        ("Sure!\n```python\nx = 1\n```\nIt sets x.\n```python\ny = 2\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```bash\npip install x\n```\nthen\n```py\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\ny = ", "x = 1\ny = "),  # cut at the token limit
        ("```python\nx = 1\ny = 2<|im_end|>", "x = 1\ny = 2"),  # ended without the mark
        ("```python\nx = 1\n```<|im_end|>", "x = 1\n"),
        ("1. First:\n   ```python\n   x = 1\n   ```", "x = 1\n"),
    ],
)
def test_the_first_python_block_is_the_code(text: str, code: str) -> None:
    assert code_of(text)[0] == code


def test_an_indented_block_runs() -> None:
    assert judge_code(
        TASK, "1. So:\n   ```python\n   def twice(x):\n       return 2 * x\n   ```"
    ).passed


def test_right_code_passes_and_wrong_code_fails() -> None:
    assert judge_code(TASK, f"Here it is:\n```python\n{RIGHT}```\n") == CodeVerdict(True)
    assert judge_code(TASK, RIGHT.replace("2 *", "x *")) == CodeVerdict(False, "AssertionError: ")
    assert "does not define twice" in judge_code(TASK, "def double(x):\n    return 2 * x").said
    assert "SyntaxError" in judge_code(TASK, "Here is a function that doubles:</s>").said


def test_code_that_was_cut_off_counts_up_to_its_last_whole_statement() -> None:
    begun = f"```python\n{RIGHT}\nprint(twice(\n    1,\n    'two"
    assert judge_code(TASK, begun).passed
    assert "SyntaxError" in judge_code(TASK, f"{begun}\n```").said
    assert "SyntaxError" in judge_code(TASK, f"{begun}<|im_end|>").said
    assert judge_code(TASK, f"```python\n{RIGHT.rstrip()}").passed
    bare = begun.removeprefix("```python\n")
    assert judge_code(TASK, bare).passed
    assert "SyntaxError" in judge_code(TASK, f"{bare}</s>").said
    tests = "```python\nassert twice(3) == 6\nassert twice(-1) == -2\nassert twice(5) == 1"
    assert judge_code(GIVEN, tests).passed
    assert not judge_code(GIVEN, f"{tests}\n").passed
    assert judge_code(GIVEN, tests.replace("== 6", "== 9")).said.startswith("on the right code")


def test_what_only_a_script_would_do_is_left_out() -> None:
    assert judge_code(TASK, f"{RIGHT}\nif __name__ == '__main__':\n    raise SystemExit(3)").passed


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "exit()",
        'print(\'{"token": "", "said": null}\')\n' + RIGHT.replace("2", "3"),
        "import os\nfor i in range(20):\n    try:\n        os.write(i, b'{\"said\": null}')\n"
        "    except OSError:\n        pass\nos._exit(0)",
        "import os\nos.closerange(0, 99)\n" + RIGHT,
        "import os\nos.abort()",
    ],
)
def test_exits_and_prints_are_no_success(code: str) -> None:
    assert not judge_code(TASK, code).passed


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "while True:\n    pass"
    monkeypatch.setattr(sandbox, "WALL_S", 0.5)
    assert "no end within 0.5 s" in judge_code(TASK, loop).said
    assert "no end" in judge_code(TASK, "import time\ntime.sleep(99)").said
    monkeypatch.setattr(sandbox, "WALL_S", 120)
    monkeypatch.setitem(sandbox.LIMITS, "RLIMIT_CPU", 1)
    assert "SIGXCPU" in judge_code(TASK, loop).said


def test_memory_files_and_output_have_an_end() -> None:
    assert judge_code(TASK, "x = 'a' * (1 << 30)").said.startswith("MemoryError")
    big = "with open('x', 'w') as file:\n    file.write('a' * (1 << 22))"
    assert "File too large" in judge_code(TASK, big).said
    assert judge_code(TASK, f"print('x' * (1 << 24))\n{RIGHT}").passed  # it goes nowhere


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import multiprocessing as m\np = m.get_context('spawn').Process(target=print)\n"
        "p.start()\np.join()",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.kill(os.getppid(), 9)",
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "import ctypes",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
    ],
)
def test_processes_signals_and_sockets_are_refused(code: str) -> None:
    found = judge_code(TASK, f"{code}\n{RIGHT}")
    assert not found.passed
    assert any(word in found.said for word in ("refused here", "not permitted", "not there"))


@pytest.mark.parametrize(
    "code",
    [
        "open({!r}, 'w')",
        "import os\nos.remove({!r})",
        "import os\nos.open({!r}, os.O_RDWR)",
        "import os\nos.rename({!r}, 'mine')",
        "import os\nos.chmod({!r}, 0)",
        "import pathlib\npathlib.Path({!r}).unlink()",
        "import os, shutil\nshutil.rmtree(os.path.dirname({!r}))",
        "import sqlite3\nsqlite3.connect({!r} + '.db')",
    ],
)
def test_files_elsewhere_are_not_changed(code: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("as it was")
    before = kept.stat()
    found = judge_code(TASK, f"{code.format(str(kept))}\n{RIGHT}")
    assert (found.passed, "refused here" in found.said) == (False, True)
    assert kept.read_text() == "as it was"
    assert kept.stat().st_mode == before.st_mode
    assert list(tmp_path.iterdir()) == [kept]


def test_files_of_its_own_threads_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "token")
    code = (
        "import io, os, sqlite3, tempfile, threading\n"
        "assert not os.listdir('.') and 'SECRET' not in os.environ\n"
        "with tempfile.TemporaryDirectory() as folder, open(folder + '/x', 'w') as file:\n"
        "    file.write('y')\n"
        "os.mkdir('a')\nos.rmdir('a')\nsqlite3.connect(':memory:').execute('SELECT 1')\n"
        "done = threading.Thread(target=print)\ndone.start()\ndone.join()\n"
    )
    assert judge_code(TASK, code + RIGHT) == CodeVerdict(True)


def test_a_thread_that_sleeps_on_is_not_waited_for() -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\n"
    assert judge_code(TASK, code + RIGHT).passed  # its limit is 30 seconds


GIVEN = CodeTask("twice", solution=RIGHT, mutant="def twice(x):\n    return x * x\n")


@pytest.mark.parametrize(
    "tests",
    [
        TESTS,
        f"def test_twice():\n    {TESTS.replace(chr(10), chr(10) + '    ')}",
        f"{RIGHT}\n{TESTS}",  # a copy of its own is not what is tested
        f"from my_module import twice\n{TESTS}",
        "import pytest\n@pytest.mark.parametrize('x, y', [(2, 4), (3, 6)])\n"
        "def test_it(x, y):\n    assert twice(x) == pytest.approx(y)",
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
        "        self.assertEqual(twice(3), 6)\nif __name__ == '__main__':\n    unittest.main()",
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
        "        self.assertEqual(twice(3), 6)\nunittest.main()",
        "class TestTwice:\n    def test_it(self):\n        assert twice(3) == 6",
        "import pytest\ndef test_it():\n    with pytest.raises(TypeError, match='NoneType'):\n"
        "        twice(None)\n    assert twice(3) == 6",
    ],
)
def test_written_tests_pass_if_they_tell_right_from_wrong(tests: str) -> None:
    assert judge_code(GIVEN, f"```python\n{tests}\n```") == CodeVerdict(True)


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("assert twice(2) == 4", "passes on the wrong code too"),
        ("", "passes on the wrong code too"),
        (f"def test_a():\n    pass\n{RIGHT}", "passes on the wrong code too"),
        ("assert twice(2) == 5", "on the right code: AssertionError"),
        ("import sys\nsys.exit(0)", "on the right code: SystemExit"),
        ("def test_it():\n    assert twice(3) == 7", "on the right code: AssertionError"),
        ("def test_it(fixture):\n    assert fixture", "on the right code: TypeError"),
        ("import pytest\ndef test_it():\n    with pytest.raises(ValueError):\n        twice(1)",
         "on the right code: AssertionError"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
         "        self.assertEqual(twice(3), 7)", "on the right code: AssertionError"),
    ],
)  # fmt: skip
def test_written_tests_fail_otherwise(tests: str, said: str) -> None:
    found = judge_code(GIVEN, f"{tests}</s>")
    assert (found.passed, found.said[: len(said)]) == (False, said)


def test_nothing_is_run_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(DraftsimError, match=r"--run-code needs the limits of Linux"):
        run(RIGHT, "twice", tests=TESTS)
