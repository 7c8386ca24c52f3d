"""Fixtures of the engine tests: hosts with real podman, runc, crun, containerd and CRIU, one set per row.

A row that cannot be built fails its tests; VGPU_ROWS leaves rows out on purpose.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.engines.prepared import prepare
from tests.hosts.host import TestHost, two_hosts
from tests.hosts.roots import HostUnavailable, root_for
from tests.hosts.rows import wanted_rows

UNAVAILABLE = {}


def pytest_configure(config):
    config.addinivalue_line("markers", "first_row: the row makes no difference, so the first one is enough")
    config.addinivalue_line("markers", "host_rows(names): rows whose hosts the test makes by itself")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "tests/engines" in str(item.path):
            item.add_marker(pytest.mark.engines)
    repeated = [item for item in items if _is_repeated(item)]
    items[:] = [item for item in items if item not in repeated]
    config.hook.pytest_deselected(items=repeated)


def _is_repeated(item):
    row = item.callspec.params.get("row") if hasattr(item, "callspec") else None
    return row is not None and item.get_closest_marker("first_row") is not None and row != wanted_rows()[0]


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", wanted_rows(), scope="session")


def pytest_collection_finish(session):
    """Build the selected tests' roots before the first test, whose time limit is no measure for a package mirror."""
    if session.config.option.collectonly or os.geteuid() != 0:
        return
    items = [item for item in session.items if item.get_closest_marker("engines")]
    rows = {item.callspec.params["row"] for item in items if "row" in getattr(item, "fixturenames", ())}
    rows |= {name for item in items for mark in item.iter_markers("host_rows") for name in mark.args}
    for row in sorted(rows):
        try:
            root_for(row)
        except (HostUnavailable, OSError, subprocess.SubprocessError) as error:
            UNAVAILABLE[row] = error


@pytest.fixture(scope="session")
def row_root(row):
    """The row's root; a row that could not be built fails each of its tests with the reason."""
    if os.geteuid() != 0:
        pytest.fail("the engine tests need root")
    if row in UNAVAILABLE:
        pytest.fail(f"row {row} could not be built: {UNAVAILABLE[row]}")
    return root_for(row)


@pytest.fixture(scope="session")
def host(row, row_root):
    """One bare host per row: engines, no vgpu-snapshot. Tests share it and remove their containers."""
    with TestHost(row, "bare") as machine:
        yield machine


@pytest.fixture
def fresh_host(row, row_root):
    """A host of this test alone."""
    with TestHost(row) as machine:
        yield machine


@pytest.fixture(scope="session")
def pair(row, row_root):
    """Two bare hosts per row with a cable between them."""
    with two_hosts(row, names=("bare-a", "bare-b")) as machines:
        yield machines


@pytest.fixture(scope="session")
def nodes(row, row_root):
    """Two hosts per row as an administrator leaves them: software GPUs, vgpu-snapshot, `vgpu setup podman`, images."""
    with two_hosts(row, names=("node-a", "node-b")) as machines:
        for machine in machines:
            prepare(machine)
        yield machines


@pytest.fixture(scope="session")
def node(nodes):
    """The first of the two nodes."""
    return nodes[0]


@pytest.fixture(scope="session")
def registry(nodes):
    """A registry on the first node, reached by both; its address."""
    return nodes[0].start_registry()
