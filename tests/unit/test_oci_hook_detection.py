"""Which containers count as GPU containers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oci_hook.gpu_detection import gpu_reason, is_gpu_container, is_gpu_device, may_use_gpu, user_switch
from oci_hook.injection import decide
from oci_hook.settings import Settings

HOOK = {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]}


def devices(*paths):
    return {"linux": {"devices": [{"path": path} for path in paths]}}


def visible(value, hooks=None):
    return {"process": {"env": [f"NVIDIA_VISIBLE_DEVICES={value}"]}, "hooks": hooks or {}}


@pytest.mark.parametrize(
    ("spec", "is_gpu"),
    [
        ({}, False),
        (devices("/dev/null", "/dev/dri/card0"), False),
        (devices("/dev/nvidia0"), True),
        (devices("/dev/nvidia12"), True),
        (devices("/dev/nvidiactl"), True),
        (devices("/dev/nvidia-uvm"), True),
        (devices("/dev/nvidia-modeset"), False),
        (devices("/dev/nvidia-caps/nvidia-cap1"), False),
        (devices("/dev/nvidia"), False),
        (devices("/dev/nvidia0x"), False),
        ({"mounts": [{"destination": "/usr/lib/x86_64-linux-gnu/libcuda.so.580.1"}]}, True),
        ({"mounts": [{"destination": "/usr/lib/libcuda.so"}]}, True),
        ({"mounts": [{"destination": "/usr/lib/libcudart.so.12"}]}, False),
        ({"mounts": [{"destination": "/data", "source": "/x/libcuda.so.1"}]}, False),
        (visible("all", HOOK), True),
        (visible("0,1", {"createRuntime": [{"path": "/opt/nvidia-ctk"}]}), True),
        (visible("all"), False),
        (visible("all", {"prestart": [{"path": "/opt/nvidia/other-hook"}]}), False),
        (visible("void", HOOK), False),
        (visible("none", HOOK), False),
        (visible("", HOOK), False),
        ({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"]}, "hooks": HOOK}, False),
        ({"hooks": HOOK}, False),
        ({"linux": None, "mounts": None, "process": None, "hooks": None}, False),
        ({"linux": {"devices": ["x", None]}, "mounts": {"a": 1}, "hooks": {"prestart": None}}, False),
    ],
)
def test_the_spec_shows_a_gpu(spec, is_gpu):
    assert (gpu_reason(spec) is not None) is is_gpu


def test_nvidias_runtime_in_the_chain_adds_the_devices_later():
    assert gpu_reason(visible("all"), runtime_adds_devices=True) == "NVIDIA_VISIBLE_DEVICES=all"
    assert gpu_reason(visible("void"), runtime_adds_devices=True) is None
    chosen = Settings()
    chosen.low_level_runtime = "/usr/bin/nvidia-container-runtime"
    assert decide(chosen, visible("all")) is not None


@pytest.mark.parametrize(
    ("inject", "annotation", "has_gpu", "decided"),
    [
        ("auto", None, True, True),
        ("auto", None, False, False),
        ("auto", "true", False, True),
        ("auto", "false", True, False),
        ("auto", "maybe", True, True),
        ("always", None, False, True),
        ("always", "false", True, False),
        ("never", None, True, False),
        ("never", "true", True, False),
    ],
)
def test_switches(inject, annotation, has_gpu, decided):
    chosen = Settings()
    chosen.inject = inject
    spec = devices("/dev/nvidia0") if has_gpu else {}
    if annotation is not None:
        spec["annotations"] = {"vgpu.snapshot/inject": annotation}
    assert (decide(chosen, spec) is not None) is decided


def test_the_annotation_is_asked_first():
    assert is_gpu_container({"annotations": {"vgpu.snapshot/inject": "TRUE "}})
    assert not is_gpu_container({**devices("/dev/nvidia0"), "annotations": {"vgpu.snapshot/inject": "false"}})
    assert user_switch({"annotations": ["odd"]}) is None


@pytest.mark.parametrize("path", ["/dev/nvidia٣", "/dev/nvidia-0", "/dev/nvidia0/", "/dev/nvidia²"])
def test_device_numbers_are_plain_digits(path):
    assert not is_gpu_device(path)


words = st.sampled_from(
    ["/dev/nvidia0", "/dev/nvidiactl", "/x/libcuda.so.1", "/x/nvidia-hook", "NVIDIA_VISIBLE_DEVICES=all", "/dev/null"]
)


@settings(max_examples=300, deadline=None)
@given(words, words, words, words, st.booleans())
def test_bytes_without_a_trace_never_hide_a_gpu(device, mount, entry, hook, is_escaped):
    spec = {
        "linux": {"devices": [{"path": device}]},
        "mounts": [{"destination": mount}],
        "process": {"env": [entry]},
        "hooks": {"prestart": [{"path": hook}]},
    }
    config = json.dumps(spec).encode()
    if is_escaped:
        config = config.replace(b"nvidia", b"nvidi\\u0061")
    if gpu_reason(spec) is not None:
        assert may_use_gpu(config)


def test_most_containers_are_told_without_parsing():
    assert not may_use_gpu(json.dumps({"process": {"args": ["nginx"], "env": ["PATH=/bin"]}}).encode())
