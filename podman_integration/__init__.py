"""What podman must be told so that its own commands freeze and restore GPU containers.

Pure: texts and documents out, for `vgpu setup podman` to write; the one module that reads files is `existing_settings`.
It runs nothing, writes nothing and never imports `containerd_integration`.
The facts about podman's behaviour come from podman 4.3, 5.4 and 5.8.
"""
