"""Who made a checkpoint and whether this node believes them: keys, statements, signatures, policy, freshness (spec/signature.md)."""
