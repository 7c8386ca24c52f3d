"""One module per verb of `vgpu`: `HELP`, `add_arguments(parser)`, `run(args, out) -> exit code`."""
