"""The node's store of checkpoints: sealed directories whose bulk is shared (spec/store.md).

    store = Store.open()
    kept = store.add(image_path)               # right after the seal
    with store.lease(kept.manifest_digest, "push") as directory:
        ...                                    # gc leaves it alone, also when another process runs it

Files here answer one question each: `identity` when two files are the same, `placing` how a file gets a second name,
`locks` who may do what at the same time, `entering` and `incoming` how a checkpoint comes in, `collecting` what goes,
`proof` whether what is there is whole, `references` which checkpoints somebody's archive needs, `usage` what takes room.
Knows no engine and no registry. The runtime shim, registry transfer and the commands call it.
"""

from image_format.store.checkpoints import StoredCheckpoint
from image_format.store.collecting import Collected
from image_format.store.incoming import Incoming
from image_format.store.proof import Proof
from image_format.store.store import DEFAULT_ROOT, Store
from image_format.store.usage import CheckpointUsage, StoreUsage

__all__ = [
    "DEFAULT_ROOT",
    "CheckpointUsage",
    "Collected",
    "Incoming",
    "Proof",
    "Store",
    "StoreUsage",
    "StoredCheckpoint",
]
