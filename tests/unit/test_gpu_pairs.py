"""Pairs of GPUs that need each other: found in a record, required of a node, and kept together where recorded GPUs go."""

from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest

from gpu_state import gpu_pairs
from gpu_state.fitness import device_map, findings, group_requirements, musts
from gpu_state.gpu_pairs import Wishes, pairs_in, peer_pairs, place
from gpu_state.node_facts import DeviceFacts
from gpu_state.nvml_links import Link
from image_format.communicators import CallCount, Communicator
from image_format.gpu_objects import Access, ImportEntry, ObjectEntry, ObjectMapping
from image_format.record import DeviceEntry, ProcessEntry, Requirement
from tests.unit.test_fitness import FACTS, GIB, uuid


def recorded(letters):
    return tuple(DeviceEntry(uuid(letter), "Model X", 16 * GIB) for letter in letters)


def node(letters, connected=(), *, unknown=(), nvlinks=0):
    """A node of these GPUs; of pairs that are not named, `connected` or `unknown`, it is known that they do not hold."""
    devices = tuple(DeviceFacts(n, uuid(letter), "Model X", 16 * GIB) for n, letter in enumerate(letters))
    links = [link(a + b, a + b in connected, nvlinks) for a, b in combinations(letters, 2) if a + b not in unknown]
    return replace(FACTS, devices=devices, links=tuple(links))


def link(pair, reaches, nvlinks=0):
    return Link(uuid(pair[0]), uuid(pair[1]), reaches, reaches, nvlinks if reaches else 0, "node")


def placed(letters, facts, peers=(), nvlink=()):
    found = place(recorded(letters), facts, Wishes(peers, nvlink))
    return "".join(found.get(uuid(letter), "    -")[4:5] for letter in letters)


ALL = [a + b for a, b in combinations("uvwxyz", 2)]


@pytest.mark.parametrize(
    ("letters", "facts", "peers", "nvlink", "expected"),
    [
        ("ab", node("ab", ["ab"]), [(0, 1)], [], "ab"),
        ("ab", node("wxyz", ["wy"]), [(0, 1)], [], "wy"),
        ("ab", node("wxyz", ["yz"]), [(0, 1)], [], "yz"),
        ("ab", node("bwx", ["wx"]), [(0, 1)], [], "wx"),  # a GPU that is present goes elsewhere to have its peer
        ("ab", node("bwx", ["bx", "wx"]), [(0, 1)], [], "xb"),  # and stays where it can
        ("abc", node("wxyz", ["wx", "yz", "xz"]), [(0, 1), (1, 2)], [], "wxz"),
        ("abc", node("wxyz", ["wx"]), [(0, 2)], [], "wyx"),
        ("abcd", node("wxyz", ["wx", "yz"]), [(0, 2), (1, 3)], [], "wyxz"),
        ("ab", node("wxyz"), [(0, 1)], [], "wx"),  # nothing holds: places all the same
        ("ab", node("wxyz", unknown=["wz"]), [(0, 1)], [], "wz"),  # nobody knows is better than no
        ("ab", node("wxyz", ["xy"], unknown=["wz"]), [(0, 1)], [], "xy"),
        ("ab", node("w", []), [(0, 1)], [], "w-"),
        ("abc", node("wxyz", ["wx", "wy", "xy"], nvlinks=4), [(0, 1)], [(1, 2)], "wxy"),
        ("ab", node("wxyz", ["yz"], nvlinks=4), [], [(0, 1)], "yz"),
        ("ab", node("abyz", ["yz"], nvlinks=4), [(0, 1)], [(0, 1)], "yz"),
        ("uvwxyz", node("uvwxyz", ALL), list(combinations(range(6), 2)), [], "uvwxyz"),
    ],
)  # fmt: skip
def test_recorded_gpus_are_placed_where_they_reach_each_other(letters, facts, peers, nvlink, expected):
    assert placed(letters, facts, tuple(peers), tuple(nvlink)) == expected


def test_peers_count_more_than_nvlink():
    facts = replace(node("wxyz"), links=(link("wx", True), Link(uuid("y"), uuid("z"), False, True, 4, "node")))
    assert placed("ab", facts, ((0, 1),), ((0, 1),)) == "wx"


def test_models_and_sizes_are_kept_while_pairs_are_looked_for():
    small = DeviceFacts(9, uuid("s"), "Model X", GIB)
    other = DeviceFacts(8, uuid("o"), "Model Y", 16 * GIB)
    facts = node("wx", ["wx"])
    facts = replace(facts, devices=(small, other, *facts.devices), links=(*facts.links, link("so", True)))
    assert placed("ab", facts, ((0, 1),)) == "wx"


def test_the_search_ends_on_a_large_node_whose_links_do_not_fit(monkeypatch):
    steps = []
    real = gpu_pairs._Search._go_on
    monkeypatch.setattr(gpu_pairs._Search, "_go_on", lambda *args: (steps.append(1), real(*args))[1])
    letters = "0123456789abcdef"
    ring = [a + b for a, b in pairwise(letters)]
    facts = node(letters, ring)
    found = place(recorded("ghijklmn"), facts, Wishes(tuple(combinations(range(8), 2))))
    assert len(set(found.values())) == 8
    assert len(steps) < gpu_pairs.MAX_STEPS + 200


# ---- requirements --------------------------------------------------------------------------------


def asked(*requirements, letters="ab"):
    return SimpleNamespace(requirements=requirements, devices=recorded(letters), processes=())


PEERS = Requirement("gpu.peers", ("0-1",))
NVLINK = Requirement("gpu.nvlink", ("0-1",), "should")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (node("ab", ["ab"], nvlinks=18), []),
        (node("wxyz", ["xz"], nvlinks=1), []),
        (node("ab", ["ab"]), [("gpu.nvlink", "should")]),
        (node("ab"), [("gpu.peers", "must"), ("gpu.nvlink", "should")]),
        (node("ab", unknown=["ab"]), [("gpu.peers", "should"), ("gpu.nvlink", "should")]),
        (replace(node("ab"), links=(Link(uuid("b"), uuid("a"), True, None, 1, None),)), [("gpu.peers", "should")]),
        (replace(node("ab"), links=(Link(uuid("b"), uuid("a"), True, False, 1, None),)), [("gpu.peers", "must")]),
        (node("a"), [("gpu.model", "must")]),
    ],
)
def test_pairs_that_do_not_hold_are_told(facts, expected):
    found = findings(asked(PEERS, NVLINK), facts)
    assert [(finding.key, finding.level) for finding in found] == expected
    assert all(finding.needed and finding.found and finding.remedy for finding in found)


def test_a_finding_names_the_gpus_on_both_sides():
    (finding,) = musts(findings(asked(PEERS), node("wx")))
    assert finding.needed == f"{uuid('a')} with {uuid('b')}"
    assert finding.found == f"not {uuid('w')} with {uuid('x')}"


def test_many_pairs_make_one_short_finding():
    letters = "abcdef"
    every = gpu_pairs.pair_texts(combinations(range(6), 2))
    (finding,) = musts(findings(asked(Requirement("gpu.peers", every), letters=letters), node(letters)))
    assert finding.needed.endswith("and 11 more pairs")


@pytest.mark.parametrize(
    "value", ["0-1", 1, ("0-2",), ("1-0",), ("0-0",), ("00-1",), ("a-b",), ("0-1", "x"), ("0-1",) * 3000]
)
def test_a_senseless_value_does_not_pass(value):
    (finding,) = findings(asked(Requirement("gpu.peers", value)), node("ab", ["ab"]))
    assert (finding.key, finding.level) == ("gpu.peers", "must")
    assert len(finding.needed) <= 200
    assert device_map(asked(Requirement("gpu.peers", value)), node("ab", ["ab"])) == {}


def test_pairs_are_read_as_they_are_written():
    pairs = tuple(combinations(range(12), 2))
    assert pairs_in(gpu_pairs.pair_texts(pairs), 12) == pairs
    assert pairs_in(gpu_pairs.pair_texts(pairs), 11) is None


def test_a_missing_nvlink_does_not_hide_that_memory_is_short():
    process = ProcessEntry(1, "train", "staged", (uuid("a"),), 4 * GIB)
    wanted = SimpleNamespace(requirements=(NVLINK,), devices=recorded("ab"), processes=(process,))
    found = findings(wanted, node("ab", ["ab"]), {uuid("a"): GIB, uuid("b"): GIB})
    assert [finding.key for finding in found] == ["gpu.nvlink", "gpu.free"]


# ---- derived from the record ---------------------------------------------------------------------


def mapping(va, *devices, flags=3):
    return ObjectMapping(va << 24, 4096, 0, tuple(Access(device, flags) for device in devices))


def held(number, device, letter, *mappings):
    return ObjectEntry(number, 4096, device, uuid(letter), "alloc", 4096, mappings)


def imported(number, of, letter, *mappings, device=None):
    return ImportEntry(number, of, "opened", 4096, 0, device, uuid(letter), mappings)


def process(pid, objects=(), imports=()):
    return ProcessEntry(pid, "p", "staged", objects=tuple(objects), imports=tuple(imports))


def of_record(*processes, letters="abc", communicators=()):
    return SimpleNamespace(
        requirements=(), devices=recorded(letters), processes=processes, communicators=communicators, nvshmem=()
    )


RANK_A = process(1, [held(1, 0, "a", mapping(1, 0))])
RANK_B = [held(1, 1, "b", mapping(1, 1))]


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([RANK_A, process(2, RANK_B)], []),
        ([RANK_A, process(2, RANK_B, [imported(2, "1/1", "a", mapping(2, 1))])], [(0, 1)]),
        ([RANK_A, process(2, RANK_B, [imported(2, "1/1", "a")])], []),  # not mapped
        ([RANK_A, process(2, RANK_B, [imported(2, "1/1", "a", mapping(2, 1, flags=0))])], []),  # no access
        ([RANK_A, process(2, RANK_B, [imported(2, "1/1", "a", mapping(2, 0), device=0)])], []),  # on its own GPU
        ([RANK_A, process(2, RANK_B, [imported(2, "1/1", "a", mapping(2, 7))])], []),  # a GPU that nothing names
        # Each process numbers the GPUs that it sees: number 0 of the second is another one than number 0 of the first.
        ([RANK_A, process(2, [held(1, 0, "c", mapping(1, 0))], [imported(2, "1/1", "a", mapping(2, 0))])], [(0, 2)]),
        ([process(1, [held(1, 0, "a", mapping(1, 0, 1)), held(2, 1, "b", mapping(2, 1))])], [(0, 1)]),
        ([process(1, [held(1, 0, "z", mapping(1, 0, 1)), held(2, 1, "b", mapping(2, 1))])], []),  # no recorded GPU
    ],
)  # fmt: skip
def test_peers_are_those_whose_memory_another_gpu_may_use(processes, expected):
    assert peer_pairs(of_record(*processes)) == expected


def communicator(pid, device, letter, version="2.28.9", library="nccl"):
    return Communicator(library, version, "ab", pid, 0, 2, device, uuid(letter), CallCount(0, 0))


def test_a_communicator_tells_the_number_of_a_gpu():
    importer = process(2, (), [imported(2, "1/1", "a", mapping(2, 5))])
    assert peer_pairs(of_record(RANK_A, importer)) == []
    assert peer_pairs(of_record(RANK_A, importer, communicators=(communicator(2, 5, "b"),))) == [(0, 1)]


def test_requirements_of_a_group_are_written_and_met_where_they_were_written():
    told = (communicator(1, 0, "a", "2.9.1"), communicator(2, 1, "b"), communicator(2, 1, "b", "9", "another"))
    importer = process(2, RANK_B, [imported(2, "1/1", "a", mapping(2, 1))])
    wanted = of_record(RANK_A, importer, letters="ab", communicators=told)
    facts = node("ab", ["ab"], nvlinks=2)
    needed = group_requirements(wanted, facts)
    assert needed == [
        Requirement("gpu.peers", ("0-1",)),
        Requirement("gpu.nvlink", ("0-1",), "should"),
        Requirement("nccl.version", ("2.9.1", "2.28.9"), "should"),
    ]
    wanted.requirements = tuple(needed)
    assert findings(wanted, facts) == []
    assert device_map(wanted, facts) == {}
    assert group_requirements(of_record(RANK_A, letters="a"), facts) == []
