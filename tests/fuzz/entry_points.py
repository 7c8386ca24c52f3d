"""Which fuzz target reaches which parser, and why some parsers have none.

A parser is a public function or method of the packages whose name says that it takes in what somebody else wrote (NAMES).
"""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = (
    "image_format", "gpu_state", "oci_hook", "runtime_shim", "podman_integration", "containerd_integration",
    "docker_integration", "vgpu_cli", "vgpu_errors",
)  # fmt: skip
NAMES = re.compile(
    r"from_(bytes|json|line|text)|parsed?(_.+)?|read(_.+)?|load(_.+)?|decode(_.+)?|unpack(_.+)?|open_stream"
)

# Target -> what it calls, whether directly or on its way.
REACHED = {
    "chunk index": ["image_format.chunk_index:from_bytes"],
    "record": [
        "image_format.record:Record.from_bytes", "image_format.record:Record.from_json", "image_format.record:Container.from_json",
        "image_format.record:LowLevelRuntime.from_json", "image_format.gpu_processes:DeviceEntry.from_json",
        "image_format.record:Requirement.from_json", "image_format.record:Phase.from_json", "image_format.record:RegionSummary.from_json",
    ],
    "record with GPU objects": [
        "image_format.gpu_processes:ProcessEntry.from_json", "image_format.record:Parent.from_json", "image_format.gpu_objects:read_objects",
        "image_format.gpu_objects:ObjectEntry.from_json", "image_format.gpu_objects:ObjectMapping.from_json",
        "image_format.gpu_objects:read_device", "image_format.gpu_objects:read_uuid",
    ],
    "record with shared memory": [
        "image_format.gpu_objects:ImportEntry.from_json", "image_format.gpu_objects:Sharing.from_json",
        "image_format.gpu_objects:DescriptorEntry.from_json", "image_format.gpu_objects:read_descriptors",
        "image_format.gpu_objects:read_object_name", "image_format.communicators:read_communicators",
        "image_format.communicators:read_nvshmem", "image_format.communicators:Communicator.from_json",
        "image_format.communicators:CallCount.from_json", "image_format.communicators:Split.from_json",
        "image_format.communicators:ShmemElement.from_json", "image_format.communicators:Team.from_json",
    ],
    "fragment": ["image_format.vram:from_bytes"],
    "fragment file": ["image_format.vram:read_fragment"],
    "manifest": ["image_format.manifest:Manifest.from_bytes", "image_format.manifest:Descriptor.from_json"],
    "bundle": ["image_format.trust.bundle:Bundle.from_bytes", "image_format.trust.dsse:Envelope.from_json"],
    "statement": ["image_format.trust.statement:Statement.from_bytes", "image_format.trust.statement:read_expires"],
    "policy": ["image_format.trust.policy:parse_default"],
    "policy rules": ["image_format.trust.policy:parse_rules"],
    "public key": ["image_format.trust.keys:parse_public_key", "image_format.trust.key_files:parse_public"],
    "private key": ["image_format.trust.key_files:parse_private"],
    "public key of a recipient": ["image_format.encryption.recipients:Recipient.parse"],
    "canonical JSON": ["image_format.canonical_json:read", "image_format.canonical_json:read_object"],
    "tar": ["image_format.archives.tar_reader:TarReader.read_into", "image_format.archives.tar_reader:TarReader.read"],
    "OCI layout": ["image_format.archives.ocistore:Blob.from_json"],
    "spec.dump": ["image_format.security_config:load"],
    "spec.dump of an archive": ["runtime_shim.restore:read_config"],
    "pagemap": ["image_format.pagemap:read"],
    "encrypted record": ["image_format.encryption.encrypted_record:EncryptedRecord.from_bytes", "image_format.encryption.recipients:WrappedKey.from_json"],
    "time": ["image_format.trust.freshness:parse_time"],
    "seen generations": ["image_format.trust.seen_generations:parse"],
    "containerd index": ["image_format.archives.containerd_index:parse"],
    "registry reference": ["image_format.registry.reference:Reference.parse"],
    "registry's JSON": ["image_format.registry.manifests:read_doc"],
    "manifest of signatures": ["image_format.trust.simple_signing:read_manifest"],
    "signed payload": ["image_format.trust.simple_signing:Payload.from_bytes"],
    "statement on an image": ["image_format.trust.image_statement:ImageStatement.from_bytes"],
    "reference note": ["image_format.references.reference:ReferenceNote.from_bytes"],
    "transport manifest": ["image_format.transport.manifest:TransportManifest.from_bytes"],
    "small files of a transport image": ["image_format.archives.small_files:read_small_files"],
    "note of a reference": ["image_format.store.references:Reference.read"],
    "agent request": ["gpu_state.requests:Request.from_line", "gpu_state.group_terms:GroupTerms.from_json"],
    "error of the agent": ["vgpu_errors.__init__:from_json"],
    "preload hello": ["gpu_state.preload_frames:Hello.from_json"],
    "preload holdings": [
        "gpu_state.preload_objects:Holdings.from_json", "gpu_state.preload_objects:DeviceObject.from_json",
        "gpu_state.preload_objects:Mapping.from_json", "gpu_state.preload_objects:Held.from_json",
        "gpu_state.preload_objects:Blocker.from_json",
    ],
    "preload shares": [
        "gpu_state.preload_objects:Share.from_json", "gpu_state.preload_objects:Import.from_json",
        "gpu_state.preload_objects:Sharing.from_json",
    ],
    "placeholder": ["gpu_state.open_descriptors:read_token"],
    "state of a gate": ["gpu_state.preload_link:GateState.from_json"],
    "preload communicators": [
        "gpu_state.communicators:Communicators.from_json", "gpu_state.communicators:Communicator.from_json",
        "gpu_state.communicators:NvshmemPe.from_json", "gpu_state.communicators:NvshmemTeam.from_json",
    ],
    "state files": ["gpu_state.known_containers:KnownContainer.from_json"],
    "journal": [
        "gpu_state.leases:Lease.from_json", "gpu_state.staged_lease:StagedPart.from_json", "gpu_state.staged_lease:StagedProcess.from_json",
        "gpu_state.shared_objects:ImportedObject.from_json", "gpu_state.staged_lease:ParkedDescriptor.from_json",
    ],
    "node facts": [
        "gpu_state.node_facts:NodeFacts.from_json", "gpu_state.node_facts:DeviceFacts.from_json", "gpu_state.node_facts:RuntimeFacts.from_json",
    ],
    "runtime.conf": ["oci_hook.settings:parse_settings"],
    "runtime.conf file": ["oci_hook.settings:read_settings"],
    "config.json edits": ["oci_hook.injection:parse_spec", "oci_hook.injection:parse_object"],
    "command line of the shim": ["runtime_shim.arguments:parse"],
    "version of a runtime": ["runtime_shim.low_level:parse_version"],
    "pid file": ["runtime_shim.restore:read_pid"],
    "containerd's config.toml": ["containerd_integration.existing_settings:parse"],
    "CDI mount of the command line": ["containerd_integration.cdi:parse_mount"],
    "loader cache": ["containerd_integration.driver_files:parse_loader_cache"],
    "docker's daemon.json": ["docker_integration.existing_settings:parse"],
    "podman's version": ["podman_integration.existing_settings:parse_version"],
    "setup manifest": [
        "vgpu_cli.installed_files:InstalledFiles.load", "vgpu_cli.installed_files:Entry.from_json", "vgpu_cli.installed_files:Before.from_json",
    ],
}  # fmt: skip

# Parser -> why it needs no target of its own.
ARCHIVES = "whole archives and directories are spoilt in test_image_format.py"
OPENED = "opens a file, whose content a target above parses"
MOVES = "moves bytes that it does not look into"
OWN_CHILD = "reads what a process of our own sends over a socket that nobody else has"
ASSEMBLED = "puts together what other targets parse"
NOT_FUZZED = {
    "image_format.archives.archive:read_archive_claims": ARCHIVES,
    "image_format.archives.archive:read_stream_claims": ARCHIVES,
    "image_format.seal_documents:read_claimed": ARCHIVES,
    "image_format.source:read_claims": ARCHIVES,
    "image_format.source:read_remote_claims": ASSEMBLED,
    "image_format.verifying:read_claims": ARCHIVES,
    "image_format.verifying:read_claimed_directory": ARCHIVES,
    "image_format.archives.archive_sources:RewindableSource.read": MOVES,
    "image_format.hashing:read_exactly": MOVES,
    "image_format.packs.pack_streams:SourceFiles.read": MOVES,
    "image_format.packs.target_files:TargetFiles.read": MOVES,
    "image_format.registry.network:read_some": MOVES,
    "image_format.registry.session:read_limited": MOVES,
    "image_format.registry.session:read_beginning": MOVES,
    "image_format.registry.network:load_certificates": "OpenSSL parses them",
    "gpu_state.staging.copy_in:PackSource.read": MOVES,
    "gpu_state.staging.copy_in:PackSource.read_bytes": MOVES,
    "image_format.trust.key_files:read_private": OPENED,
    "image_format.trust.key_files:read_public": OPENED,
    "image_format.trust.keys:load_signing_key": OPENED,
    "image_format.trust.keys:load_public_key": OPENED,
    "image_format.trust.policy:Policy.load": OPENED,
    "image_format.trust.policy:load_trusted": OPENED,
    "image_format.encryption.recipients:Recipient.load": OPENED,
    "image_format.encryption.recipients:Identity.load": OPENED,
    "image_format.references.reference:read_note": OPENED,
    "image_format.store.checkpoints:read_checkpoint": OPENED,
    "runtime_shim.checkpoint:read_config": "the same as runtime_shim.restore:read_config with another error",
    "runtime_shim.state_file:read": OPENED,
    "oci_hook.bundle_file:BundleFile.read": OPENED,
    "image_format.encryption.__init__:open_stream": "every frame is authenticated; tests/format/test_encryption*.py spoil each byte",
    "image_format.archives.small_files:unpack_small_files": ASSEMBLED,
    "image_format.references.reference_archive:unpack": ASSEMBLED,
    "image_format.references.reference_directory:unpack": ASSEMBLED,
    "image_format.packs.unpacking:unpack": ASSEMBLED,
    "image_format.trust.remote_documents:read": ASSEMBLED,
    "gpu_state.driver:Device.from_json": OWN_CHILD,
    "gpu_state.inventory_proof:Tally.from_json": OWN_CHILD,
    "gpu_state.processes:GpuProcess.from_json": "reads the agent's answer, which only root can give",
    "gpu_state.host_ties:Tie.from_json": "reads the agent's answer, which only root can give",
    "gpu_state.nvml:Nvml.load": "loads a library of the driver",
    "containerd_integration.flat_tar:unpack": "a loop over TarReader with plain names only, which the target tar and test_archive_hardening.py cover",
    "containerd_integration.api.connection:Connection.read": "protobuf parses it",
    "containerd_integration.nri.multiplex:Multiplexer.read_frame": "a fixed header with a length that is held against a limit; tests/unit/test_nri*.py",
    "containerd_integration.nri.ttrpc:parsed": "protobuf parses it",
    "image_format.archives.containerd_archive:read_index": ARCHIVES,
    "image_format.archives.containerd_archive:read_file_claims": ARCHIVES,
    "image_format.archives.containerd_archive:read_blob": ARCHIVES,
}


def entry_points():
    """`module:qualified.name` of every parser."""
    return {
        point for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py")) for point in _of(path)
    }


def _of(path):
    module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    return _in(ast.parse(path.read_text(encoding="utf-8")), f"{module}:")


def _in(node, prefix):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _in(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef) and NAMES.fullmatch(child.name):
            yield prefix + child.name
