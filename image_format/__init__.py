"""The checkpoint image: what is in it, that it is whole, and who made it. Knows no engine and no GPU.

Sealing goes one way, verifying the other; every arrow is one digest:

    files of the checkpoint -> chunk ids -> index -> manifest -> statement -> signature
    (hashing)                  (chunk_index)         (manifest)  (statement)  (dsse, bundle, keys)

`sealing.seal` writes a checkpoint directory's four `vgpu-*` documents, the signature last.
`verifying.verify_directory`, `archive.verify_archive` and `ocistore.verify_image` believe nothing before the signature.
`record` is the document that people and restore gates read; `security_config` is what a restore compares.
The written formats are under spec/; spec/README.md lists them.
"""
