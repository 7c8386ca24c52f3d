"""The checkpoint image: what is in it, that it is whole, and who made it. Knows no engine and no GPU.

Sealing goes one way, verifying the other; every arrow is one digest:

    files of the checkpoint -> chunk ids -> index -> manifest -> statement -> signature
    (hashing)                  (chunk_index)         (manifest)  (trust.statement, trust.dsse, trust.bundle, trust.keys)

`sealing.seal` writes a checkpoint directory's four `vgpu-*` documents, the signature last; `verifying.verify_directory`
believes nothing before the signature. `record` is the document that people and restore gates read; `security_config` is what a
restore compares. Around this core, each package on those before it:

    trust        keys, statements, signatures, the node's policy, freshness
    encryption   blobs for named recipients only
    archives     the same directory in engines' archives, OCI layouts and podman's storage
    packs        the same content cut into packs for transport, with the same content root
    store        what this node keeps, by content, shared between checkpoints
    references   directories and archives whose bulk lies elsewhere
    registry     any OCI registry: blobs, manifests, referrers; knows nothing of checkpoints
    transport    push and pull, over packs, store and registry
    source       what a word on the command line means, whichever of these it is

The written formats are under spec/; spec/README.md lists them.
"""
