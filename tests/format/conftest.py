"""A node's settings, a record and a small checkpoint directory, for the tests of the image format."""

import pytest

from image_format.trust.keys import make_node_key
from image_format.trust.policy import Policy
from tests.format.make_vectors import base_files, base_record


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    etc = tmp_path_factory.mktemp("etc")
    make_node_key(etc)
    return etc


@pytest.fixture(scope="session")
def policy(node):
    return Policy.load(node)


@pytest.fixture(scope="session")
def record():
    return base_record()


@pytest.fixture
def image(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, data in base_files().items():
        (folder / name).write_bytes(data)
    return folder
