"""A low-level runtime that records how it was called and behaves as a scenario says.

Two things in one file. Imported: `install(folder)` puts an executable into a folder and gives a `SimulatedRuntime` that
sets scenarios and reads the record. Run (as that executable): it finds scenario and record beside itself, because
engines call some verbs with an environment that could not name them.

Every call appends one JSON line to calls.jsonl: argv, cwd, environment (raw, in order), open descriptors, parent-death
signal, parent, process group, and for the verbs that read them the bytes of config.json and of the process file, read
after `read_after_s`. What happens then, per verb (all optional):
  exit, stdout, stderr      status and output
  log                       an error line for --log
  sleep_s                   how long it works; signals that come meanwhile are recorded and SIGTERM ends it with 143
  ignores_sigterm           SIGTERM is recorded only
  starts                    seconds that a child of its own sleeps, as CRIU would
  read_after_s              delay before config.json is read
  dies_of                   a signal number that it sends itself
create, run and restore make the container known to `state`, delete forgets it; `pid` names its process.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import sys
import time

VALUE_OPTIONS = ("--root", "--log", "--log-format", "--criu", "--rootless", "--cgroup-manager")


# ---- the test's side ----------------------------------------------------------------------------


class Call:
    """One recorded call."""

    def __init__(self, record):
        self.argv = record["argv"]
        self.cwd = record["cwd"]
        self.env = [base64.b64decode(entry) for entry in record["env"]]
        self.descriptors = {int(number): target for number, target in record["descriptors"].items()}
        self.pdeathsig = record["pdeathsig"]
        self.parent = record["parent"]
        self.pid = record["pid"]
        self.group = record["group"]
        self.config = _decoded(record["config"])
        self.process = _decoded(record["process"])

    @property
    def verb(self):
        return _verb_and_rest(self.argv[1:])[0]


class SimulatedRuntime:
    """The runtime that was installed in a folder."""

    def __init__(self, folder, name="runc"):
        self.folder = str(folder)
        self.path = os.path.join(self.folder, name)

    def behaves(self, **scenario):
        """Set what each verb does, such as `create={"exit": 1}`."""
        with open(os.path.join(self.folder, "scenario.json"), "w", encoding="utf-8") as file:
            json.dump(scenario, file)

    def calls(self):
        """All calls so far, in order."""
        try:
            with open(os.path.join(self.folder, "calls.jsonl"), encoding="utf-8") as file:
                return [Call(json.loads(line)) for line in file]
        except FileNotFoundError:
            return []

    def signals(self):
        """Names of the signals that a working call received."""
        try:
            with open(os.path.join(self.folder, "signals"), encoding="utf-8") as file:
                return file.read().split()
        except FileNotFoundError:
            return []

    def wait_for_call(self, verb, deadline_s=10.0):
        """The first call of a verb, once it is there."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            found = [call for call in self.calls() if call.verb == verb]
            if found:
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"no {verb} within {deadline_s} s")

    def knows(self, container_id):
        """Whether a container was created and not deleted."""
        return os.path.exists(os.path.join(self.folder, "containers", container_id))


def install(folder, name="runc"):
    """Put the executable into the folder."""
    os.makedirs(folder, exist_ok=True)
    runtime = SimulatedRuntime(folder, name)
    with open(__file__, encoding="utf-8") as own, open(runtime.path, "w", encoding="utf-8") as file:
        file.write(f"#!{sys.executable} -IS\n{own.read()}")
    os.chmod(runtime.path, 0o755)
    runtime.behaves()
    return runtime


def _decoded(text):
    return None if text is None else base64.b64decode(text)


# ---- the runtime's side -------------------------------------------------------------------------


def main():
    """Record, behave, end."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    with open(os.path.join(folder, "scenario.json"), encoding="utf-8") as file:
        scenario = json.load(file)
    verb, rest = _verb_and_rest(sys.argv[1:])
    if verb == "--version":
        print("runc version 1.3.6\ncommit: simulated\nspec: 1.2.1")
    behaviour = scenario.get(verb, {})
    _watch_signals(folder, behaviour)
    time.sleep(behaviour.get("read_after_s", 0))
    _record(folder, rest)
    _write(1, behaviour.get("stdout", ""))
    _write(2, behaviour.get("stderr", ""))
    _log(behaviour.get("log"))
    status = behaviour.get("exit", 0) or _keep_books(folder, verb, rest, scenario.get("pid", 1))
    if behaviour.get("starts") and os.fork() == 0:
        os.closerange(0, 3)
        os.execv("/bin/sleep", ["sleep", str(behaviour["starts"])])
    until = time.monotonic() + behaviour.get("sleep_s", 0)
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.02))
    if behaviour.get("dies_of"):
        if behaviour["dies_of"] != signal.SIGKILL:
            signal.signal(behaviour["dies_of"], signal.SIG_DFL)
        os.kill(os.getpid(), behaviour["dies_of"])
        time.sleep(5)
    return status


def _verb_and_rest(words):
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--version":
        at += 2 if words[at] in VALUE_OPTIONS else 1
    return (words[at], words[at + 1 :]) if at < len(words) else (None, [])


def _option(words, *names):
    for at, word in enumerate(words):
        for name in names:
            if word == name and at + 1 < len(words):
                return words[at + 1]
            if word.startswith(name + "="):
                return word[len(name) + 1 :]
    return None


def _watch_signals(folder, behaviour):
    def note(number, _frame):
        with open(os.path.join(folder, "signals"), "a", encoding="utf-8") as file:
            file.write(signal.Signals(number).name + "\n")
        if number == signal.SIGTERM and not behaviour.get("ignores_sigterm"):
            os._exit(143)

    if behaviour.get("sleep_s"):
        for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH"):
            signal.signal(getattr(signal, "SIG" + name), note)


def _record(folder, rest):
    bundle = _option(rest, "--bundle", "-b") or "."
    process = _option(rest, "--process", "-p")
    with open("/proc/self/environ", "rb") as file:
        environment = file.read().split(b"\0")[:-1]
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
    record = {
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "env": [base64.b64encode(entry).decode() for entry in environment],
        "descriptors": _descriptors(),
        "pdeathsig": death.value,
        "parent": os.getppid(),
        "pid": os.getpid(),
        "group": os.getpgid(0),
        "config": _content(os.path.join(bundle, "config.json")),
        "process": _content(process) if process else None,
    }
    with open(os.path.join(folder, "calls.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _descriptors():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own
            continue
    return found


def _content(path):
    try:
        with open(path, "rb") as file:
            return base64.b64encode(file.read()).decode()
    except OSError:
        return None


def _keep_books(folder, verb, rest, pid):
    """What create, run, restore, state and delete say to each other."""
    container_id = rest[-1] if rest else ""
    known = os.path.join(folder, "containers", container_id)
    if verb in ("create", "run", "restore"):
        os.makedirs(os.path.dirname(known), exist_ok=True)
        with open(known, "w", encoding="utf-8") as file:
            file.write(str(pid))
        pid_file = _option(rest, "--pid-file")
        if pid_file and os.path.isdir(os.path.dirname(pid_file)):
            with open(pid_file, "w", encoding="utf-8") as file:
                file.write(str(pid))
    elif verb == "state":
        if not os.path.exists(known):
            _write(2, "container does not exist\n")
            return 1
        print(json.dumps({"ociVersion": "1.2.1", "id": container_id, "pid": pid, "status": "running", "bundle": "/b"}))
    elif verb == "delete" and os.path.exists(known):
        os.unlink(known)
    return 0


def _log(message):
    path = _option(sys.argv, "--log")
    if message and path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"level": "error", "msg": message}) + "\n")


def _write(descriptor, text):
    if text:
        os.write(descriptor, text.encode())


if __name__ == "__main__":
    sys.exit(main())
