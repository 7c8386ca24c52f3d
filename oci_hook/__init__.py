"""Decides what a GPU container needs in its config.json, and puts it there. Standard library only: it runs at every container start."""
