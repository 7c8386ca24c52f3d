"""The edits of a spec: tables, and the laws that hold for every spec."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oci_hook.edits import (
    BUILD_ID_ANNOTATION,
    CONTROL_IN_CONTAINER,
    LIBC_ANNOTATION,
    LIBRARY_IN_CONTAINER,
    Context,
    apply_edits,
    is_own_mount,
    merged_environment,
    plan_edits,
)

OURS = LIBRARY_IN_CONTAINER
CONTEXT = Context(
    libc="glibc",
    build_id="ab12",
    library_source="/usr/lib/vgpu-snapshot/preload/glibc/ab12/libvgpu.so",
    control_source="/run/vgpu/containers/c1",
)
OTHER_NODE = Context(
    libc="musl",
    build_id="ff00",
    library_source="/usr/lib/vgpu-snapshot/preload/musl/ff00/libvgpu.so",
    control_source="/run/vgpu/containers/old-id",
)


def edited(spec, context=CONTEXT):
    result = copy.deepcopy(spec)
    apply_edits(result, plan_edits(result, context))
    return result


def test_a_container_gets_library_control_directory_preload_and_annotations():
    spec = {"process": {"env": ["PATH=/bin"]}, "mounts": [{"destination": "/proc"}], "annotations": {"a": "b"}}
    assert edited(spec) == {
        "process": {"env": ["PATH=/bin", f"LD_PRELOAD={OURS}"]},
        "mounts": [
            {"destination": "/proc"},
            {
                "destination": "/run/vgpu-preload/libvgpu.so",
                "type": "bind",
                "source": "/usr/lib/vgpu-snapshot/preload/glibc/ab12/libvgpu.so",
                "options": ["bind", "rprivate", "ro", "nosuid", "nodev"],
            },
            {
                "destination": "/run/vgpu",
                "type": "bind",
                "source": "/run/vgpu/containers/c1",
                "options": ["bind", "rprivate", "ro", "nosuid", "nodev", "noexec"],
            },
        ],
        "annotations": {"a": "b", BUILD_ID_ANNOTATION: "ab12", LIBC_ANNOTATION: "glibc"},
    }


def test_the_source_of_a_bind_mount_is_named_by_what_its_link_leads_to():
    linked = Context(
        libc="glibc",
        build_id="ab12",
        library_source="/l",
        control_source="/c",
        links={"/usr/libexec/init": "/usr/bin/init"},
    )
    mounts = [
        {"destination": "/a", "type": "bind", "source": "/usr/libexec/init"},
        {"destination": "/b", "source": "/usr/libexec/init", "options": ["rbind"]},
        {"destination": "/c", "type": "bind", "source": "/usr/bin/other"},
        {"destination": "/d", "type": "tmpfs", "source": "/usr/libexec/init"},
    ]
    sources = [mount["source"] for mount in edited({"mounts": mounts}, linked)["mounts"][:4]]
    assert sources == ["/usr/bin/init", "/usr/bin/init", "/usr/bin/other", "/usr/libexec/init"]


def test_the_library_can_be_executed_and_the_control_directory_can_not():
    mounts = {mount["destination"]: mount["options"] for mount in edited({})["mounts"]}
    assert "noexec" not in mounts[LIBRARY_IN_CONTAINER]
    assert "noexec" in mounts[CONTROL_IN_CONTAINER]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], [f"LD_PRELOAD={OURS}"]),
        (["A=1"], ["A=1", f"LD_PRELOAD={OURS}"]),
        (["LD_PRELOAD=/u.so", "A=1"], [f"LD_PRELOAD={OURS}:/u.so", "A=1"]),
        (["LD_PRELOAD=/u.so:/v.so"], [f"LD_PRELOAD={OURS}:/u.so:/v.so"]),
        (["LD_PRELOAD=/u.so /v.so"], [f"LD_PRELOAD={OURS}:/u.so:/v.so"]),
        (["LD_PRELOAD=/u.so: /v.so::"], [f"LD_PRELOAD={OURS}:/u.so:/v.so"]),
        (["LD_PRELOAD="], [f"LD_PRELOAD={OURS}"]),
        (["LD_PRELOAD=/first.so", "A=1", "LD_PRELOAD=/last.so"], [f"LD_PRELOAD={OURS}:/last.so", "A=1"]),
        ([f"LD_PRELOAD={OURS}"], [f"LD_PRELOAD={OURS}"]),
        ([f"LD_PRELOAD={OURS}:{OURS}"], [f"LD_PRELOAD={OURS}"]),
        ([f"LD_PRELOAD=/u.so:{OURS}:/u.so"], [f"LD_PRELOAD={OURS}:/u.so"]),
        (["LD_PRELOAD_X=/u.so"], ["LD_PRELOAD_X=/u.so", f"LD_PRELOAD={OURS}"]),
        (["LD_PRELOAD=$LIB/u.so"], [f"LD_PRELOAD={OURS}:$LIB/u.so"]),
    ],
)
def test_preload_is_merged_with_the_users_own(before, after):
    assert merged_environment(before, OURS) == after


@pytest.mark.parametrize(
    ("mount", "is_own"),
    [
        ({"destination": "/run/vgpu", "source": "/run/vgpu/containers/x"}, True),
        ({"destination": "/run/vgpu", "source": "/srv/users-own"}, False),
        ({"destination": "/run/vgpu-preload/libvgpu.so", "source": "/other/preload/glibc/1/libvgpu.so"}, True),
        ({"destination": "/run/vgpu-preload/libvgpu.so", "source": "/srv/x.so"}, False),
        ({"destination": "/srv", "source": "/run/vgpu/containers/x"}, False),
        ("nonsense", False),
    ],
)
def test_own_mounts_are_known_by_destination_and_source(mount, is_own):
    assert is_own_mount(mount) is is_own


def test_edits_of_another_node_and_id_are_replaced():
    assert edited(edited({"process": {"env": []}}, OTHER_NODE)) == edited({"process": {"env": []}})


def test_a_spec_without_process_or_mounts_is_edited_all_the_same():
    assert {"mounts", "annotations"} == set(edited({}))
    assert "env" in edited({"process": {"args": ["x"]}})["process"]


names = st.sampled_from(["/u.so", "/v.so", OURS, "", "libm.so"])
preloads = st.lists(names, max_size=4).flatmap(
    lambda parts: st.sampled_from([":", " "]).map(lambda joint: "LD_PRELOAD=" + joint.join(parts))
)
environments = st.lists(st.one_of(preloads, st.sampled_from(["A=1", "PATH=/bin", "B"])), max_size=6)
mounts = st.lists(
    st.sampled_from(
        [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/run", "type": "tmpfs"},
            {"destination": "/run/vgpu", "type": "bind", "source": "/run/vgpu/containers/other"},
            {"destination": "/run/vgpu", "type": "bind", "source": "/srv/mine"},
            {"destination": LIBRARY_IN_CONTAINER, "type": "bind", "source": "/lib/libvgpu.so"},
        ]
    ),
    max_size=5,
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "process": st.fixed_dictionaries({}, optional={"env": environments, "args": st.just(["x"])}),
        "mounts": mounts,
        "annotations": st.dictionaries(st.sampled_from(["a", BUILD_ID_ANNOTATION]), st.text(max_size=3), max_size=2),
        "linux": st.just({"devices": []}),
    },
)


@settings(max_examples=300, deadline=None)
@given(specs)
def test_editing_twice_is_editing_once(spec):
    once = edited(spec)
    assert edited(once) == once


@settings(max_examples=300, deadline=None)
@given(specs)
def test_ours_is_first_once_and_nothing_of_the_users_is_lost(spec):
    env = edited(spec).get("process", {}).get("env")
    if env is None:
        return
    values = [entry.partition("=")[2].split(":") for entry in env if entry.startswith("LD_PRELOAD=")]
    assert len(values) == 1
    assert values[0][0] == OURS
    assert len(values[0]) == len(set(values[0]))
    given_env = spec["process"].get("env", [])
    assert [entry for entry in env if not entry.startswith("LD_PRELOAD=")] == [
        entry for entry in given_env if not entry.startswith("LD_PRELOAD=")
    ]


@settings(max_examples=300, deadline=None)
@given(specs)
def test_taking_out_undoes_putting_in(spec):
    clean = edited(spec, None)
    assert meaning(edited(edited(clean), None)) == meaning(clean)


def meaning(spec):
    """A spec with empty lists left out and LD_PRELOAD as the loader reads it: the last entry, each library once."""
    env = spec.get("process", {}).get("env", [])
    preloads = [entry.partition("=")[2].replace(":", " ").split() for entry in env if entry.startswith("LD_PRELOAD=")]
    others = [entry for entry in env if not entry.startswith("LD_PRELOAD=")]
    process = {
        **spec.get("process", {}),
        "env": others,
        "preload": list(dict.fromkeys(preloads[-1] if preloads else [])),
    }
    return {key: value for key, value in {**spec, "process": process}.items() if value}


@settings(max_examples=200, deadline=None)
@given(specs)
def test_taking_out_of_a_spec_without_edits_changes_nothing(spec):
    clean = edited(spec, None)
    assert edited(clean, None) == clean
