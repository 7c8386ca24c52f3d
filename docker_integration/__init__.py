"""What Docker Engine must be told so that `docker run --runtime vgpu-runtime` and `docker checkpoint` work.

Pure: a text out, for `vgpu setup docker` to write; the one module that reads files is `existing_settings`.
It starts and restarts no daemon, writes nothing and never imports another engine's package.
The facts about Docker's behaviour come from Debian's docker.io with containerd 2 (docs/docker.md).
"""
