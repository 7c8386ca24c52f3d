"""Every fuzz target by name; entry_points.py says which parsers each reaches."""

from tests.fuzz.image_targets import IMAGE
from tests.fuzz.node_targets import NODE
from tests.fuzz.transfer_targets import TRANSFER
from tests.fuzz.trust_targets import TRUST

TARGETS = IMAGE | NODE | TRANSFER | TRUST
