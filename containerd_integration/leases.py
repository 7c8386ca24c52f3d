"""A lease of containerd's: what is written under it is safe from the garbage collector until the work is done.

It expires by itself, so that a killed command leaves nothing for good. Called by `checkpointing` and `restoring`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import uuid
from typing import TYPE_CHECKING

from vgpu_errors import EngineFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from containerd_integration.api.connection import Connection

EXPIRY_KEY = "containerd.io/gc.expire"
PREFIX = "vgpu-"


@contextlib.contextmanager
def leased(connection: Connection, what: str, *, hours: float) -> Iterator[str]:
    """A lease for the calls of this connection inside the block."""
    identifier = f"{PREFIX}{what}-{uuid.uuid4().hex[:12]}"
    ends = dt.datetime.now(dt.UTC) + dt.timedelta(hours=hours)
    labels = {EXPIRY_KEY: ends.strftime("%Y-%m-%dT%H:%M:%SZ")}
    connection.call("leases", "Create", id=identifier, labels=labels)
    connection.use_lease(identifier)
    try:
        yield identifier
    finally:
        connection.use_lease("")
        with contextlib.suppress(EngineFailed):  # it expires by itself
            connection.call("leases", "Delete", id=identifier)
