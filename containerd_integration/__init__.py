"""What containerd and other CDI engines must be told: runtime handler, CDI spec of the node's GPUs, RuntimeClass.

Pure: texts and documents out, for `vgpu setup` to write; `driver_files` and `existing_settings` only look at the node.
It runs no container, writes nothing and never imports `podman_integration`.
The facts about containerd's behaviour come from containerd 1.7.24 and 2.1.9.
"""
