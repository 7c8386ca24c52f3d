"""Checkpoints whose bulk lies elsewhere: `vgpu-reference.json`, and the way back to a whole one (spec/archive-layout.md, section 7)."""
