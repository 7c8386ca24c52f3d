"""`vgpu doctor`: looks at this node, or at one container, and says what stands in the way of a checkpoint.

Changes nothing, but starts the agent where it does not run, because only the driver can say that it works.
The rules are in gpu_state/doctor.py; here is the looking. Exit code 20 when something must be mended.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state import doctor
from gpu_state.client import DEFAULT_SOCKET, AgentClient
from gpu_state.doctor import Check
from gpu_state.host_ties import Tie, judge_all
from gpu_state.node_facts import NodeFacts, NodeFactsError, RuntimeFacts, gather
from gpu_state.processes import GpuProcess, gpu_holdings, open_files
from oci_hook.settings import read_settings
from runtime_shim import state_file
from runtime_shim.host_side import criu_side
from vgpu_cli.known import find_container
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from gpu_state.known_containers import KnownContainer
    from oci_hook.settings import Settings
    from vgpu_cli.output import Output

HELP = "check this node, or one container, and say what to mend"
DESCRIPTION = (
    "Looks at this node (driver, agent, CRIU, low-level runtime, engine, cgroups, keys, space), or at one container, and "
    "says what stands in the way of a checkpoint, with the object, the rule it breaks and the remedy. Changes nothing, "
    "but starts the agent where it does not run. Exit code 20 says that something must be mended."
)
EXAMPLES = (("vgpu doctor", "check this node"), ("vgpu doctor train", "check the container named train"))

RUNTIME_PATH = "/usr/bin/vgpu-runtime"
CONTAINERS_CONF = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
CONTAINERS_CONF_FOLDERS = ("/usr/share/containers/containers.conf.d", "/etc/containers/containers.conf.d")
STORAGE = ("/var/lib/containers", "/var/tmp")  # noqa: S108 - podman puts its archives there
_AGENT_S = 30.0
_TOOL_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("container", nargs="?", metavar="CONTAINER", help="look at this container's GPU processes")
    parser.add_argument(
        "--socket", metavar="PATH", default=DEFAULT_SOCKET, help="the agent's socket (default: %(default)s)"
    )
    parser.add_argument("--no-start", action="store_true", help="do not start the agent where it does not run")


def run(args: argparse.Namespace, out: Output) -> int:
    """Look, show, and judge."""
    checks = _container_checks(args) if args.container else _node_checks(args)
    failed = [check for check in checks if check.status == "fail"]
    out.json({"ok": not failed, "container": args.container, "checks": [check.to_json() for check in checks]})
    out.table("", ["", "check", "found"], [[check.status, check.key, check.what] for check in checks])
    for check in checks:
        if check.status != "ok" and check.remedy:
            out.line(f"{check.key}: {check.remedy}")
    return 20 if failed else 0


# ---- the node -----------------------------------------------------------------------------------------


def _node_checks(args: argparse.Namespace) -> list[Check]:
    settings, settings_check = _read_settings(Path(args.etc))
    agent, answer = _ask_agent(args, settings.low_level_runtime)
    facts = NodeFacts.from_json(answer) if answer else None
    local, problem = (facts, "") if facts else _look_without_agent(settings.low_level_runtime)
    nodes = sorted(
        str(path) for path in Path("/dev").glob("nvidia*") if path.name[6:7].isdigit() or path.is_char_device()
    )
    checks = [
        agent,
        settings_check,
        doctor.driver(local, problem),
        doctor.device_nodes(nodes, len(local.devices)),
        doctor.gpu_links(local),
        doctor.criu(local.criu_version, local.kernel),
        *_criu_checks(local.criu_version),
        doctor.runtime(local.runtime),
        doctor.libcriu(local.runtime, _loads("libcriu.so.2")),
        *_podman_checks(),
        doctor.cgroup(local.cgroup_version, _has_freezer(local.cgroup_version)),
        *_trust_checks(Path(args.etc)),
        doctor.preload(dict(local.preload)),
        doctor.staging_reserve(settings.staging_reserve, answer),
        *_space_checks(),
    ]
    return [check for check in checks if check is not None]


def _read_settings(etc: Path) -> tuple[Settings, Check]:
    """runtime.conf, and whether every line of it can be used; a bad line stops containers with a GPU from starting."""
    path = str(etc / "runtime.conf")
    try:
        return read_settings(path), Check("settings", "ok", path)
    except VgpuError as error:
        return read_settings(path, is_strict=False), Check("settings", "fail", error.message, error.remedy)


def _ask_agent(args: argparse.Namespace, runtime: str | None) -> tuple[Check, dict[str, Any] | None]:
    """Whether it answers, and its facts, which can be read."""
    if os.geteuid() != 0:
        return Check("agent", "fail", "only root can ask it", "Run 'vgpu doctor' as root."), None
    try:
        with AgentClient.connect(args.socket, start_on_demand=not args.no_start) as agent:
            hello = agent.request("hello", deadline_s=_AGENT_S)
            facts = agent.request("facts", {"runtime": runtime}, deadline_s=_AGENT_S)
            NodeFacts.from_json(facts)
    except VgpuError as error:
        return Check("agent", "fail", error.message, error.remedy), None
    except NodeFactsError as error:
        return Check("agent", "fail", f"its facts are damaged: {error}", "Restart the agent."), None
    return Check("agent", "ok", f"version {hello.get('version')}, pid {hello.get('pid')}"), facts


def _look_without_agent(runtime: str | None) -> tuple[NodeFacts, str]:
    """The same looking, with a driver worker of our own; the problem with the driver, if there is one."""
    from gpu_state.deadline import Deadline  # noqa: PLC0415 - the agent's own parts, needed where it is dead
    from gpu_state.driver_location import driver_folder  # noqa: PLC0415
    from gpu_state.remote_driver import RemoteDriver  # noqa: PLC0415
    from gpu_state.worker_pool import WorkerPool  # noqa: PLC0415

    pool = WorkerPool(driver_folder())
    try:
        node = RemoteDriver(pool).node(Deadline(_AGENT_S))
    except VgpuError as error:
        return gather(driver_release=None, cuda_version=None, devices=(), runtime_path=runtime), error.message
    finally:
        pool.close()
    facts = gather(
        driver_release=node.release,
        cuda_version=node.cuda_version,
        devices=node.devices,
        links=node.links,
        runtime_path=runtime,
    )
    return facts, ""


def _criu_checks(version: str | None) -> list[Check]:
    if version is None:
        return []
    plugins = [str(path) for folder in doctor.CRIU_PLUGIN_FOLDERS if (path := Path(folder) / "cuda_plugin.so").exists()]
    return [doctor.criu_check(*_run_criu_check()), doctor.cuda_plugin(plugins)]


def _run_criu_check() -> tuple[int | None, str]:
    program = shutil.which("criu") or "/usr/sbin/criu"
    try:
        done = subprocess.run([program, "check"], capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return None, str(problem)
    return done.returncode, done.stdout + done.stderr


def _podman_checks() -> list[Check]:
    if shutil.which("podman") is None:
        return []
    return [doctor.registered_runtime(_registered_path(), RUNTIME_PATH)]


def _registered_path() -> str | None:
    """The path that podman's own reading order ends up with."""
    folders = (Path(folder).glob("*.conf") for folder in CONTAINERS_CONF_FOLDERS)
    found = None
    for file in [*map(Path, CONTAINERS_CONF), *(path for folder in folders for path in sorted(folder))]:
        try:
            runtimes = tomllib.loads(file.read_text()).get("engine", {}).get("runtimes", {})
            paths = runtimes.get("vgpu-runtime")
            found = str(paths[0]) if paths else found
        except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError):
            continue
    return found


def _has_freezer(version: int) -> bool:
    # On cgroup2 every cgroup but the root has cgroup.freeze; the root shows that the hierarchy is there.
    return version == 2 or Path("/sys/fs/cgroup/freezer").is_dir() or Path("/sys/fs/cgroup/unified").is_dir()


def _trust_checks(etc: Path) -> list[Check]:
    from image_format.trust.policy import Policy  # noqa: PLC0415 - loads cryptography, which container checks do not need

    try:
        policy = Policy.load(etc)
    except VgpuError as error:
        policy_check = Check("policy", "fail", error.message, error.remedy)
    else:
        status: doctor.Status = "warn" if policy.allows_unsigned else "ok"
        remedy = "Set the default to 'refuse-untrusted' in policy.json." if policy.allows_unsigned else ""
        policy_check = Check("policy", status, f"{policy.default}, {len(policy.keys)} trusted keys", remedy)
    try:
        found = (etc / "node.key").stat()
    except OSError:
        return [policy_check, doctor.key_file(None, 0)]
    return [policy_check, doctor.key_file(found.st_mode & 0o777, found.st_uid)]


def _space_checks() -> list[Check]:
    present = [path for path in STORAGE if Path(path).is_dir()]
    return [doctor.space(path, shutil.disk_usage(path).free, 0) for path in present]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# ---- one container --------------------------------------------------------------------------------------


def _container_checks(args: argparse.Namespace) -> list[Check]:
    container = find_container(args.container)
    held = gpu_holdings(container.cgroup)
    if not held:
        return [Check("processes", "ok", "no process of this container uses the GPU now")]
    checks, has_unseen = _inventory_checks(args, container)
    for process in held:
        checks += doctor.blockers(process.pid, process.comm, open_files(process.pid))
    return [*checks, *_memory_space(checks), *([doctor.UNSEEN] if has_unseen else [])]


def _inventory_checks(args: argparse.Namespace, container: KnownContainer) -> tuple[list[Check], bool]:
    """What the agent and the preload libraries say; and whether a process is left whose memory nobody can look into."""
    wanted = {"container": container.id, "cgroup": container.cgroup, "blockers": True, "host_ties": True}
    settings, _ = _read_settings(Path(args.etc))
    try:
        with AgentClient.connect(args.socket, start_on_demand=not args.no_start) as agent:
            answer = agent.request("inventory", wanted, deadline_s=_AGENT_S)
            facts = agent.request("facts", {"runtime": settings.low_level_runtime}, deadline_s=_AGENT_S)
    except VgpuError as error:
        return [Check("processes", "fail", error.message, error.remedy)], True
    processes = [GpuProcess.from_json(doc) for doc in answer["processes"]]
    if answer.get("suspended"):
        return [Check("processes", "warn", "this container is suspended", "Resume it with 'vgpu resume'.")], False
    holdings = answer.get("holdings") or {}
    checks = [judge_processes(processes)]
    for process in processes:
        if str(process.pid) in holdings:
            checks += doctor.holdings(process.pid, process.comm, holdings[str(process.pid)])
    checks += _host_tie_checks(container, answer, facts)
    return checks, any(str(process.pid) not in holdings for process in processes)


def _host_tie_checks(container: KnownContainer, answer: dict[str, Any], facts: dict[str, Any]) -> list[Check]:
    """What the processes hold of the host, judged as a checkpoint without any option would be."""
    node = NodeFacts.from_json(facts)
    state = state_file.read(container.id) or {}
    try:
        config = json.loads(Path(str(state.get("bundle", "")), "config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    side = criu_side(None, node.runtime or RuntimeFacts("", ""), config, node, container.engine)
    return doctor.host_ties(judge_all(map(Tie.from_json, answer.get("host_ties") or ()), side))


def judge_processes(processes: Sequence[GpuProcess]) -> Check:
    """All GPU processes must be running, or somebody else is at work on them."""
    shown = ", ".join(f"{p.comm} ({p.pid}) {p.state}" for p in processes) or "none"
    if any(process.state != "running" for process in processes):
        return Check("processes", "fail", shown, "Thaw them first, or wait for whoever froze them.")
    return Check("processes", "ok", shown)


def _memory_space(checks: Sequence[Check]) -> list[Check]:
    return [] if any(check.status == "fail" for check in checks) else _space_checks()
