"""The node agent: finds a container's GPU processes, freezes and thaws them through the driver, judges nodes.

`client` is what the runtime shim and the command line load; everything else runs inside `vgpu-agent` or `vgpu doctor`.
Imports image_format and vgpu_errors, no engine package. The protocol is spec/agent-protocol.md.
"""
