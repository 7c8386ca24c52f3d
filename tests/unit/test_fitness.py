"""Which checkpoints a node may restore, and where each recorded GPU goes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpu_state import node_facts
from gpu_state.fitness import device_map, findings, musts, requirements_from, version_tuple
from gpu_state.node_facts import DeviceFacts, NodeFacts, NodeFactsError, RuntimeFacts
from gpu_state.nvml_links import Link
from gpu_state.processes import GpuProcess
from image_format.record import DeviceEntry, ProcessEntry, Requirement

GIB = 1 << 30


def uuid(letter):
    return f"GPU-{letter * 8}-{letter * 4}-{letter * 4}-{letter * 4}-{letter * 12}"


def gpu(letter, *, ordinal=0, name="Model X", gib=16):
    return DeviceFacts(ordinal, uuid(letter), name, gib * GIB)


def entry(letter, *, name="Model X", gib=16):
    return DeviceEntry(uuid(letter), name, gib * GIB)


FACTS = NodeFacts(
    driver_release="580.159.04",
    cuda_version="13.0",
    devices=(gpu("a"), gpu("b", ordinal=1)),
    criu_version="4.2.1",
    runtime=RuntimeFacts("runc", "1.3.6"),
    kernel="6.18.44",
    cgroup_version=2,
    machine="x86_64",
    cpu_flags=("avx2", "avx512f", "pti", "sse4_2"),
    preload={"glibc": "11aa", "musl": None},
    preload_builds=("glibc/00ff", "glibc/11aa"),
    links=(Link(uuid("a"), uuid("b"), True, True, 18, "node"),),
    nccl_version="2.28.9",
)


def record(*requirements, devices=(), processes=()):
    return SimpleNamespace(requirements=requirements, devices=devices, processes=processes)


def own_record(**changes):
    process = GpuProcess(1, 1, "python", "running", devices=(uuid("a"),))
    needed = requirements_from(replace(FACTS, **changes), [process], preload_build="glibc/00ff")
    return record(*needed, devices=(entry("a"),))


def test_a_node_is_fit_for_its_own_checkpoint():
    assert findings(own_record(), FACTS) == []


def test_requirements_survive_the_record_parser():
    from image_format.fields import Fields

    for requirement in own_record().requirements:
        assert Requirement.from_json(Fields(requirement.to_json(), "r")) == requirement


@pytest.mark.parametrize(
    ("change", "key", "level"),
    [
        ({"driver_release": "580.160.01"}, "driver.release", "must"),
        ({"driver_release": None}, "driver.release", "must"),
        ({"cuda_version": "12.9"}, "cuda.version", "must"),
        ({"devices": ()}, "gpu.count", "must"),
        ({"devices": (gpu("c", name="Model Y"),)}, "gpu.model", "must"),
        ({"devices": (gpu("c", gib=8),)}, "gpu.memory", "must"),
        ({"criu_version": "4.2"}, "criu.version", "must"),
        ({"criu_version": None}, "criu.version", "must"),
        ({"runtime": RuntimeFacts("crun", "1.21")}, "runtime.name", "must"),
        ({"runtime": None}, "runtime.name", "must"),
        ({"runtime": RuntimeFacts("runc", "1.2.9")}, "runtime.version", "should"),
        ({"kernel": "6.1.0-18-amd64"}, "kernel.version", "should"),
        ({"cgroup_version": 1}, "cgroup.version", "must"),
        ({"machine": "aarch64"}, "machine", "must"),
        ({"cpu_flags": ("avx2", "sse4_2")}, "cpu.flags", "must"),
        ({"preload_builds": ("glibc/11aa",)}, "preload.build", "must"),
    ],
)
def test_a_node_that_lacks_something_is_told_what(change, key, level):
    found = {finding.key: finding for finding in findings(own_record(), replace(FACTS, **change))}
    assert found[key].level == level
    assert found[key].remedy
    assert found[key].needed
    assert found[key].found
    assert bool(musts(found.values())) == any(finding.level == "must" for finding in found.values())


@pytest.mark.parametrize(
    "change",
    [
        {"criu_version": "4.10"},
        {"cuda_version": "13.4"},
        {"kernel": "7.0.1"},
        {"runtime": RuntimeFacts("runc", "1.3.0")},  # the patch level is not compared
        {"runtime": RuntimeFacts("runc", "2.0.0")},
        {"cpu_flags": ("amx_tile", "avx2", "avx512f", "sse4_2")},  # "pti" is the kernel's affair
        {"devices": (gpu("z"), gpu("y", ordinal=1))},
    ],
)
def test_a_newer_or_equal_node_is_fit(change):
    assert findings(own_record(), replace(FACTS, **change)) == []


def test_all_findings_come_at_once():
    bad = replace(FACTS, criu_version=None, machine="aarch64", devices=())
    assert {"criu.version", "machine", "gpu.count", "gpu.model"} <= {f.key for f in findings(own_record(), bad)}


@pytest.mark.parametrize("level", ["must", "should"])
def test_an_unknown_requirement_is_a_finding_of_its_own_level(level):
    (finding,) = findings(record(Requirement("moon.phase", "full", level)), FACTS)
    assert (finding.key, finding.level) == ("moon.phase", level)


@pytest.mark.parametrize("value", ["two", [], -1])
def test_a_senseless_count_does_not_pass(value):
    found = findings(record(Requirement("gpu.count", value)), FACTS)
    assert [finding.key for finding in found] == ["gpu.count"]


@pytest.mark.parametrize(
    ("recorded", "here", "expected"),
    [
        ("ab", "ab", {}),
        ("ba", "ab", {}),
        ("a", "xyza", {}),
        ("a", "x", {"a": "x"}),
        ("ab", "xy", {"a": "x", "b": "y"}),
        ("ab", "bx", {"a": "x", "b": "b"}),
        ("ab", "xb", {"a": "x", "b": "b"}),
        ("ab", "x", {"a": "x"}),
    ],
)
def test_recorded_gpus_are_placed(recorded, here, expected):
    node = replace(FACTS, devices=tuple(gpu(letter, ordinal=n) for n, letter in enumerate(here)))
    placed = device_map(record(devices=[entry(letter) for letter in recorded]), node)
    assert placed == {uuid(old): uuid(new) for old, new in expected.items()}


def test_gpus_go_to_their_own_model_and_only_where_they_fit():
    node = replace(FACTS, devices=(gpu("x", name="Big", gib=80), gpu("y", gib=8), gpu("z", gib=16)))
    wanted = record(devices=[entry("a"), entry("b", name="Big", gib=80)])
    assert device_map(wanted, node) == {uuid("a"): uuid("z"), uuid("b"): uuid("x")}


@pytest.mark.parametrize(("free_gib", "is_fit"), [(4, True), (3, False)])
def test_free_memory_is_checked_where_it_goes(free_gib, is_fit):
    node = replace(FACTS, devices=(gpu("x"),))
    process = ProcessEntry(1, "python", "driver", (uuid("a"),), 4 * GIB)
    wanted = record(devices=[entry("a")], processes=[process])
    found = findings(wanted, node, {uuid("x"): free_gib * GIB})
    assert [finding.key for finding in found] == ([] if is_fit else ["gpu.free"])


@pytest.mark.parametrize(("text", "expected"), [("6.18.44-2-amd64", (6, 18, 44)), ("4.2", (4, 2)), ("", ()), ("x", ())])
def test_versions_are_read_to_their_first_word(text, expected):
    assert version_tuple(text) == expected


def test_facts_survive_json():
    assert NodeFacts.from_json(FACTS.to_json()) == FACTS


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"devices": None}, "facts.devices"),
        ({"devices": [{"ordinal": 0}]}, r"facts.devices\[0\].uuid"),
        ({"kernel": 6}, "facts.kernel"),
        ({"cgroup_version": "2"}, "facts.cgroup_version"),
        ({"runtime": {"name": "runc"}}, "facts.runtime.version"),
        ({"links": {}}, "facts.links"),
        ({"links": [{"a": "GPU-1"}]}, r"facts.links\[0\].b"),
        ({"links": [{"a": "GPU-1", "b": "GPU-2", "reads": 1}]}, r"facts.links\[0\].reads"),
        ({"links": [{"a": "GPU-1", "b": "GPU-2", "nvlinks": "18"}]}, r"facts.links\[0\].nvlinks"),
    ],
)
def test_damaged_facts_name_the_fault(damage, named):
    with pytest.raises(NodeFactsError, match=named):
        NodeFacts.from_json(FACTS.to_json() | damage)


def test_facts_of_an_agent_that_tells_no_links_are_read():
    doc = FACTS.to_json()
    del doc["links"], doc["nccl_version"]
    assert NodeFacts.from_json(doc) == replace(FACTS, links=(), nccl_version=None)


@pytest.mark.parametrize(("name", "expected"), [("libnccl.so.2.28.9", "2.28.9"), ("libnccl.so.2", None), (None, None)])
def test_the_node_s_own_nccl_is_known_by_its_file_name(tmp_path, name, expected):
    if name is not None:
        (tmp_path / name).write_bytes(b"")
    if expected is not None:
        (tmp_path / "libnccl.so.2").symlink_to(name)
    assert node_facts.nccl_version([tmp_path / "absent", tmp_path]) == expected


@pytest.mark.parametrize(
    ("needed", "here", "is_met"),
    [
        (("2.28.9",), "2.28.9", True),
        (("2.27.3", "2.28.9"), "2.28.9", True),
        (("2.28.9",), None, True),
        (("2.28.9",), "2.29.0", False),
        ("2.28.9", "2.29.0", False),
    ],
)
def test_another_nccl_on_the_node_is_told(needed, here, is_met):
    found = findings(record(Requirement("nccl.version", needed, "should")), replace(FACTS, nccl_version=here))
    assert [(finding.key, finding.level) for finding in found] == ([] if is_met else [("nccl.version", "should")])
