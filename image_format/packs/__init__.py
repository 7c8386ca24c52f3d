"""The packed form for transport: planning, writing and unpacking packs (spec/transport.md)."""
