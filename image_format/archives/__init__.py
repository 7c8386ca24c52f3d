"""Where checkpoints are found: engines' archives, tars, OCI layouts and podman's storage. Reads and edits streams; believes nothing."""
