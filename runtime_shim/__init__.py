"""`vgpu-runtime`: an OCI runtime command line that stands in front of runc or crun."""
