"""Packages: missing extras, slow libraries, and other distributions with our packages' names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import draftsim
from tests.conftest import ROOT, SMALL_PROFILE
from traces.errors import EXTRAS, DraftsimError

SCRIPT = """
import contextlib, importlib.machinery, io, json, sys

absent, commands = json.loads(sys.argv[1])

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

at = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[at] = Finder
import draftsim

ended = {}
for name, command in commands.items():
    sys.argv, code, said = ["draftsim", *command], 0, io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            draftsim.main()
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:
            code = repr(error)
    ended[name] = [code, said.getvalue()]
print(json.dumps(ended))
"""
PLAIN = {
    "simulate": ("simulate", "--policy", "fixed:gamma=2", "--resamples", "2"),
    "serve": ("serve", "--policy", "fixed:gamma=2", "--batch", "1", "--requests", "2"),
    "sweep": ("sweep", "--policy", "fixed:gamma=2", "--c", "0.1", "--jobs", "1"),
    "tune": ("tune", "--engine", "hf", "--resamples", "4"),
    "check": ("check", "--tokens", "1000"),
    "list": ("list",),
}
"""Commands that no extra is needed for."""


def ended(
    absent: tuple[str, ...], commands: dict[str, tuple[object, ...]], cache: Path
) -> dict[str, tuple[int, str]]:
    """How each command ends where packages are not installed: its code and what it says."""
    given = json.dumps([absent, {n: [*map(str, c)] for n, c in commands.items()}])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DRAFTSIM_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, given], cwd=cache, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: (code, said) for name, (code, said) in json.loads(done.stdout).items()}


def needs(extra: str, how: tuple[int, str]) -> None:
    code, said = how
    assert code == 2, how
    assert said.count("\n") == 1, said
    assert f"`pip install '.[{extra}]'`" in said


@pytest.fixture
def recorded(synthetic_run: Path, tmp_path: Path) -> Path:
    """A run folder that `validate` takes for one."""
    folder = Path(shutil.copytree(synthetic_run, tmp_path / "run"))
    about = {"target": "bundled", "draft": "bundled", "device": "cpu"}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


def with_models(run: Path, tmp_path: Path) -> dict[str, tuple[object, ...]]:
    return {
        "profile": (*SMALL_PROFILE, "--out", tmp_path / "new"),
        "sources": (*SMALL_PROFILE, "--out", tmp_path / "new", "--exit-layers"),
        "validate": ("validate", "--run", run, "--policy", "fixed:gamma=2"),
        "lossy": ("validate", "--run", run, "--policy", "fixed:gamma=2", "--verify", "top-k"),
        "batched": ("validate", "--run", run, "--policy", "fixed:gamma=2", "--batch", 2),
        "demo": ("demo", "--out", tmp_path / "demo"),
        "fetch": ("fetch", "smollm2"),
    }


def test_after_a_plain_install_models_are_one_line_away(recorded: Path, tmp_path: Path) -> None:
    absent = (*(name for names in EXTRAS.values() for name in names), "filelock", "vllm")
    plain = {
        name: (*command, "--trace", recorded) if name != "list" else command
        for name, command in PLAIN.items()
    }
    models = with_models(recorded, tmp_path)
    cluster = ("sweep", "--c", "0.1", "--cluster", "tcp://127.0.0.1:1", "--trace", recorded)
    engine = ("profile", "--engine", "vllm", "--target", "x", "--out", tmp_path / "e")
    found = ended(absent, {**plain, **models, "cluster": cluster, "engine": engine}, tmp_path)
    for name in plain:
        assert found[name][0] == 0, found[name]
    for name in models:
        code, said = found[name]
        if name == "demo":  # after what needs no models
            said = said.splitlines(keepends=True)[-1]
        needs("profile,smollm2" if name == "fetch" else "profile", (code, said))
    needs("cluster", found["cluster"])
    assert found["engine"][0] == 2
    assert "vLLM is not installed here" in found["engine"][1].splitlines()[-1]
    for made in ("new", "demo", "e"):
        assert not (tmp_path / made).exists()


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_one_absent_package_is_named(package: str, recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    commands = with_models(recorded, tmp_path)
    found = ended((package,), {n: commands[n] for n in ("profile", "validate", "fetch")}, tmp_path)
    for name in found:
        needs("profile", found[name])
        assert f"needs {package}, not installed" in found[name][1]


def test_what_reads_gguf_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from profiler.fetched.fetch import check_packages

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DraftsimError, match=r"gguf and accelerate.*\.\[profile,smollm2\]'`"):
        check_packages()


STRANGE = "raise RuntimeError('imported')\n"


def started(*path: Path) -> subprocess.CompletedProcess[str]:
    """``draftsim --version`` with these folders first on the path."""
    code = "import draftsim, sys; sys.argv[1:] = ['--version']; draftsim.main()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.invariant(15)
@pytest.mark.parametrize("name", draftsim.PACKAGES)
def test_a_package_of_another_earlier_on_the_path_is_refused(name: str, tmp_path: Path) -> None:
    strange = tmp_path / name / "__init__.py"
    strange.parent.mkdir()
    strange.write_text(STRANGE)
    done = started(tmp_path, ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"draftsim: `import {name}` finds {strange}, not draftsim's own")
    assert "virtual environment of its own" in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_installed_over_ours_is_refused(tmp_path: Path) -> None:
    """Two distributions with a package of one name share its folder; the later one's files stay."""
    shutil.copy(ROOT / "draftsim.py", tmp_path)
    for name in draftsim.PACKAGES:
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / name / "__init__.py", tmp_path / name)
    strange = tmp_path / "traces" / "__init__.py"
    strange.write_text(STRANGE)
    done = started(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"draftsim: {strange} is another distribution's")


def test_a_folder_of_data_with_such_a_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    done = started(tmp_path, ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("draftsim")


SLOW = {"scipy", "matplotlib", "torch", "transformers", "joblib", "sklearn", "dask"}


@pytest.mark.parametrize(
    "modules",
    [
        ("simulator", "simulator.whatif.sweep", "traces", "commands.tune"),
        ("simulator.serving",),
    ],
    ids=str,
)
def test_no_slow_library_comes_with_a_package(modules: tuple[str, ...]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {name.partition(".")[0] for name in done.stdout.split()} & SLOW


def test_no_optimiser_is_loaded_where_something_is_read_beyond_the_cells() -> None:
    """Prompts of the default recording are longer than its latencies know, and need the fit."""
    asked = ["simulate", "--trace", "smollm2-cpu", "--policy", "rate-optimal", "--prefill"]
    code = (
        f"import sys, draftsim\nsys.argv = ['draftsim', *{[*asked, '--json', '-']}]\n"
        "from traces.latency import interpolate\n"
        "fit, fitted = interpolate.non_negative, []\n"
        "interpolate.non_negative = lambda *given: fitted.append(1) or fit(*given)\n"
        "try:\n    draftsim.main()\n"
        "except SystemExit:\n"
        "    print(bool(fitted), 'scipy.optimize' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "True False"


def test_no_slow_library_is_loaded_to_say_that_a_folder_is_no_run(tmp_path: Path) -> None:
    kinds = [[], ["--source", "pld"], ["--batch", "2"], ["--verify", "csd"]]
    code = (
        f"import sys, draftsim\nfor kind in {kinds}:\n"
        f"    sys.argv = ['draftsim', 'validate', '--run', {str(tmp_path)!r}, *kind]\n"
        "    try:\n        draftsim.main()\n"
        "    except SystemExit as stop:\n        print(stop.code, file=sys.stderr)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said, codes = done.stderr.splitlines()[::2], done.stderr.splitlines()[1::2]
    assert codes == ["2"] * len(kinds)
    assert all(line.startswith(f"draftsim: {tmp_path} is not a run folder") for line in said)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & SLOW
    assert not list(tmp_path.iterdir())
