"""containerd's gRPC API, as much of it as this project calls: messages, a connection, blobs of the content store.

`definitions` holds the messages and services in proto syntax, `wire` makes classes of them, `connection` speaks.
Nothing is generated and nothing of containerd's is copied in: names and field numbers are the API's public facts
(docs/decisions/0005-grpc-for-containerd.md).
"""
