"""The process that runs untrusted code, with the standard library alone.

It reads a job as JSON from standard input, gives up what it may do, runs the code, and writes one
JSON verdict to standard output. `profiler.checks.sandbox` starts it, and kills it if it takes too
long.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import io
import json
import os
import platform
import resource
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Namespace = dict[str, Any]

REFUSED = (
    "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.system", "subprocess.", "socket.",
    "ctypes.", "os.link", "os.symlink", "os.chown", "os.setxattr", "os.removexattr", "pty.spawn",
    "webbrowser.", "urllib.", "syslog.", "signal.pthread_kill", "resource.setrlimit",
    "resource.prlimit",
)  # fmt: skip
"""Beginnings of audit events that are refused."""
OWN = {
    "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.mkdir": 1, "os.chmod": 1, "os.truncate": 1,
    "os.utime": 1, "sqlite3.connect": 1,
}  # fmt: skip
"""Audit events that are refused outside of our folder, and how many paths they begin with."""
FOLDERS = ("os.remove", "os.rmdir", "os.rename", "os.mkdir", "os.chmod", "os.utime")
"""Audit events whose last arguments are numbers of the folders that paths are relative to."""
NUMBERS = {
    # denied: socket, socketpair, fork, vfork, execve, execveat, kill, tkill, tgkill, ptrace,
    # process_vm_writev, io_uring_setup, unshare, setns, mount, rt_sigqueueinfo, rt_tgsigqueueinfo,
    # pidfd_send_signal, setrlimit, prlimit64, bpf
    "x86_64": (0xC000003E, 56, 435, (
        41, 53, 57, 58, 59, 322, 62, 200, 234, 101, 311, 425, 272, 308, 165, 129, 297, 424, 160,
        302, 321,
    )),
    "aarch64": (0xC00000B7, 220, 435, (
        198, 199, 221, 281, 129, 130, 131, 117, 271, 425, 97, 268, 40, 138, 240, 424, 164, 261, 280,
    )),
}  # fmt: skip
"""Per machine: the kernel's name of it, the numbers of clone and clone3, and of calls denied."""


def main() -> None:
    """Read the job, run it, write the verdict."""
    job = json.loads(sys.stdin.buffer.read())
    verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for used in (0, 1, 2):
        os.dup2(nothing, used)
    sys.stdin = io.StringIO()
    write, leave, dump = os.write, os._exit, json.dumps  # the code may replace them
    token = job.pop("token")
    confine(job.pop("limits"))
    try:
        run(**job)
        said = None
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"[:200]
    write(verdict, dump({"token": token, "said": said}).encode())
    leave(0)


def run(code: str, entry: str, given: str, tests: str, cut: bool) -> None:
    """Run `code`, and then its `tests`; raise if anything fails.

    Without `tests` the code is itself tests of `entry`, which is what the code `given` defines.
    """
    if cut:
        # Half of an assert may be one too, which says something else; half of a function does not.
        code = whole_statements(code if tests else code[: code.rfind("\n") + 1])
    unit: Any = None
    if "pytest" in code:
        sys.modules["pytest"] = stand_in_for_pytest()
    if "unittest" in code:
        import unittest as unit

        unit.main = lambda *_, **__: None
    names: Namespace = {"__name__": "answer"}
    if tests:
        exec(compile(code, "<answer>", "exec"), names)
        if entry not in names:
            raise NameError(f"the answer does not define {entry}")
        exec(compile(tests, "<tests>", "exec"), names)
        return
    exec(compile(given, "<given>", "exec"), names)
    before = set(names)
    exec(compile(without(code, entry), "<answer>", "exec"), names)
    for name, value in list(names.items()):
        if name in before:
            continue
        if unit and isinstance(value, type) and issubclass(value, unit.TestCase):
            result = unit.TestResult()
            unit.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            for _, trace in (*result.failures, *result.errors):
                raise AssertionError(trace.strip().splitlines()[-1])
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [m for m in dir(value) if m.startswith("test")]:
                getattr(value(), method)()
        elif callable(value) and name.startswith("test"):
            value()


def whole_statements(code: str) -> str:
    """Return the code without lines at its end that are no Python, as where it was cut off."""
    lines = code.splitlines()
    while lines:
        with suppress(SyntaxError):
            ast.parse("\n".join(lines))
            break
        lines.pop()
    return "\n".join(lines)


def without(code: str, entry: str) -> ast.Module:
    """Return the code without definitions and imports of `entry`: it tests the one given."""
    tree = ast.parse(code)
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == entry:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if alias.name != entry]
            if not node.names:
                continue
        kept.append(node)
    tree.body = kept
    return tree


def stand_in_for_pytest() -> types.ModuleType:
    """Return a small replacement for pytest with the parts that short tests use."""
    import re

    @contextmanager
    def raises(expected: Any, match: str | None = None) -> Iterator[types.SimpleNamespace]:
        caught = types.SimpleNamespace(value=None)
        try:
            yield caught
        except expected as error:
            caught.value = error
            if match is not None and not re.search(match, str(error)):
                raise AssertionError(f"{error} does not match {match}") from None
        else:
            raise AssertionError(f"{expected} was not raised")

    def parametrize(names: Any, rows: Any, **_: Any) -> Callable[[Any], Any]:
        several = "," in names if isinstance(names, str) else len(names) > 1
        keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(function: Any) -> Any:
            def every() -> None:
                for row in rows:
                    function(**dict(zip(keys, row if several else [row], strict=True)))

            return every

        return decorate

    class Approx:
        def __init__(self, value: float, rel: float = 1e-6, abs: float = 1e-12) -> None:
            self.value, self.rel, self.least = value, rel, abs

        def __eq__(self, other: object) -> bool:
            far = max(self.rel * abs(self.value), self.least)
            return isinstance(other, int | float) and abs(other - self.value) <= far

        __hash__ = None  # type: ignore[assignment]

    module = types.ModuleType("pytest")
    mark = types.SimpleNamespace(parametrize=parametrize)
    for name, value in {"raises": raises, "mark": mark, "approx": Approx}.items():
        setattr(module, name, value)
    module.main = lambda *_, **__: 0  # type: ignore[attr-defined]
    return module


def confine(limits: dict[str, int]) -> None:
    """Give up everything but computing, reading, and writing files into the current folder."""
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # Beyond the first limit of processor time comes SIGXCPU, beyond the second SIGKILL.
        resource.setrlimit(number, (most, most + 1 if name == "RLIMIT_CPU" else most))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the process that started this one
    if not filter_calls(libc):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]
    own = os.path.realpath(os.getcwd()) + os.sep
    harmless = (os.devnull, ":memory:", "")
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    real, joined, text, link = os.path.realpath, os.path.join, os.fsdecode, os.readlink

    def is_own(path: Any, folder: Any = -1) -> bool:
        """Return True if a path, relative to an open folder if one is given, is in our folder."""
        if isinstance(path, int) or text(path) in harmless:
            return True
        base = link(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder > -1 else ""
        return real(joined(base, text(path))).startswith(own)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            fine = not ((args[2] or 0) & writes) or is_own(args[0])
        elif event in OWN:
            paths = args[: OWN[event]]
            folders = args[-len(paths) :] if event in FOLDERS else (-1,) * len(paths)
            fine = all(map(is_own, paths, folders))
        elif event == "import" and args[0] in ("ctypes", "_ctypes"):
            raise ImportError(f"{args[0]} is not there")
        else:
            fine = not event.startswith(REFUSED)
        if not fine:
            raise PermissionError(f"{event} is refused here")

    sys.addaudithook(audit)


def filter_calls(libc: Any) -> bool:
    """Have the kernel deny sockets, new processes and signals (seccomp); False if it cannot."""
    if platform.machine() not in NUMBERS or sys.platform != "linux":
        return False
    machine, clone, clone3, denied = NUMBERS[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    deny, unknown, allow, kill = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000, 1 << 31
    rules = [(load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, kill), (load, 0, 0, 0)]
    rules += [(at_least, 0, 1, 0x40000000), (give, 0, 0, deny)]  # calls of another interface
    for number in denied:
        rules += [(equal, 0, 1, number), (give, 0, 0, deny)]
    # glibc falls back on clone, whose flags can be read here: threads may be made.
    rules += [(equal, 0, 1, clone3), (give, 0, 0, unknown), (equal, 0, 3, clone)]
    rules += [(load, 0, 0, 16), (any_bit, 1, 0, 0x10000), (give, 0, 0, deny)]
    rules += [(give, 0, 0, allow)]
    program = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    kept = ctypes.create_string_buffer(program)
    whole = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(kept))
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        return False
    return bool(libc.prctl(22, 2, ctypes.create_string_buffer(whole), 0, 0) == 0)  # PR_SET_SECCOMP


if __name__ == "__main__":
    main()
