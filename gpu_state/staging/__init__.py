"""The data plane of staged mode: device memory to packs or host memory and back, with proof (docs/staged-mode.md).

Runs in a process of its own, one for each container at work (worker.py); the agent steers it through worker_client.py.
"""
