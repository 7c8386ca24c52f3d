"""The one tree of errors, by who must act: user, node, image, registry, runtime, bug.

A class's docstring is its message; the names in braces are its keyword arguments.
`exit_code` is unique over the whole tree (tests/unit/test_errors.py), `remedy` says what to do about it.
Imports nothing, because the hook and the runtime shim load it at every container start.
"""

from collections.abc import Iterator


class VgpuError(Exception):
    """{what}"""

    exit_code = 1
    remedy = "Please report this with the output of 'vgpu doctor --json'."

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        template = type(self).__doc__ or "{what}"
        super().__init__(template.strip().format_map(_Named(fields)))
        if fields.get("remedy"):
            self.remedy = str(fields["remedy"])

    @property
    def message(self) -> str:
        """What failed and on which object, one line."""
        return str(self)

    def to_json(self) -> dict[str, object]:
        """The form that crosses the agent's socket and `--json` output."""
        doc: dict[str, object] = {
            "class": type(self).__name__,
            "exit_code": self.exit_code,
            "message": self.message,
            "remedy": self.remedy,
        }
        notes: list[str] = getattr(self, "__notes__", [])
        return doc | ({"notes": list(notes)} if notes else {})


class _Named(dict[str, object]):
    """Leaves an unknown name in the message rather than fail while reporting a failure."""

    def __missing__(self, key: str) -> str:
        return "{" + key + "}"


def from_json(doc: dict[str, object]) -> VgpuError:
    """Rebuild an error that another process sent with `to_json`."""
    name, message = str(doc.get("class", "")), str(doc.get("message", "unknown error"))
    for cls in all_errors():
        if cls.__name__ == name:
            error = cls.__new__(cls)
            Exception.__init__(error, message)
            error.fields = {}
            error.remedy = str(doc.get("remedy", cls.remedy))
            for note in notes if isinstance(notes := doc.get("notes"), list) else []:
                error.add_note(str(note))
            return error
    return VgpuError(what=message)


def all_errors(root: type[VgpuError] = VgpuError) -> Iterator[type[VgpuError]]:
    """Every class of the tree, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)


# ---- user: 10-19 ---------------------------------------------------------------------------------


class UserError(VgpuError):
    """{what}"""

    exit_code = 10
    remedy = "Correct the command line; '--help' lists what it takes."


class BadConfiguration(UserError):
    """{path}: {what}"""

    exit_code = 11
    remedy = "Correct the file, or remove it and run 'vgpu setup podman' again."


class NeedsRoot(UserError):
    """{what} needs root."""

    exit_code = 12
    remedy = "Run it as root; engines refuse checkpoint and restore to other users anyway."


class NoSuchContainer(UserError):
    """No container named {container} is known here."""

    exit_code = 13
    remedy = "'vgpu ps' lists the GPU containers of this node."


class NoGroup(UserError):
    """No container that runs here belongs to a group {group}."""

    exit_code = 19
    remedy = "Create the containers with '--annotation vgpu.snapshot/group=NAME'; 'vgpu ps' shows the group of each."


class NoSuchImage(UserError):
    """{path} holds no checkpoint: {what}"""

    exit_code = 14
    remedy = "Name a checkpoint directory, an archive made by 'podman container checkpoint --export', or an image."


class UnsupportedRequest(UserError):
    """{what}"""

    exit_code = 15
    remedy = "Leave the option out."


class BadReference(UserError):
    """{text} is no reference to an image in a registry: {what}"""

    exit_code = 16
    remedy = "Write HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST], for example registry.example.org/team/model:1."


class NoSuchCheckpoint(UserError):
    """The store {root} has no checkpoint {wanted}: {what}"""

    exit_code = 18
    remedy = "'vgpu store ls' lists what is there."


class StillNeeded(UserError):
    """Checkpoint {digest} stays in the store: {what}"""

    exit_code = 17
    remedy = "Wait until whoever uses it has ended; '--force' forgets archives that refer to it."


# ---- node: 20-49 ---------------------------------------------------------------------------------


class NodeError(VgpuError):
    """{what}"""

    exit_code = 20
    remedy = "'vgpu doctor' says what this node lacks."


class AgentUnreachable(NodeError):
    """The node agent does not answer on {socket}: {what}"""

    exit_code = 21
    remedy = "Look at 'systemctl status vgpu-agent' or start 'vgpu-agent' by hand to see why."


class AgentRefused(NodeError):
    """The node agent refused {verb}: {what}"""

    exit_code = 22
    remedy = "The agent serves root alone; see spec/agent-protocol.md for what it accepts."


class DeadlineExceeded(NodeError):
    """{phase} took longer than {seconds} s."""

    exit_code = 23
    remedy = "The step was undone. Raise the deadline in /etc/vgpu/runtime.conf if the node is merely slow."


class DriverMissing(NodeError):
    """No NVIDIA driver library could be loaded: {what}"""

    exit_code = 24
    remedy = "Install the NVIDIA driver (570 or newer) or put the folder of libcuda.so.1 into 'driver_dir' of /etc/vgpu/runtime.conf."


class DriverCallFailed(NodeError):
    """{call} failed on process {pid}: {code} ({name})"""

    exit_code = 25
    remedy = "'vgpu doctor' shows the process's driver state; the steps before were undone."


class GpuProcessUnreadable(NodeError):
    """Process {pid} ({comm}) of {container} holds {path}, but the driver knows no checkpointable state of it: {what}"""

    exit_code = 26
    remedy = "Wait until the process has finished its CUDA initialisation, or stop it before the checkpoint."


class NotEnoughDeviceMemory(NodeError):
    """Device {device} has {free_bytes} bytes free, process {pid} needs {needed_bytes}."""

    exit_code = 27
    remedy = "Free device memory on that GPU or choose another node."


class NotEnoughSpace(NodeError):
    """{path} has {free_bytes} bytes free, the checkpoint needs about {needed_bytes}."""

    exit_code = 28
    remedy = "Free space there or give the engine another storage location."


class NodeUnfit(NodeError):
    """This node cannot run the checkpoint: {what}"""

    exit_code = 30
    remedy = "Each finding above names its own remedy."


class ToolMissing(NodeError):
    """{tool} was not found on this node: {what}"""

    exit_code = 31
    remedy = "Install it; 'vgpu doctor' lists what a node needs."


class CheckpointFailed(NodeError):
    """{what}"""

    exit_code = 32
    remedy = "The container goes on running as before; the log named above has the cause."


class RestoreFailed(NodeError):
    """{what}"""

    exit_code = 33
    remedy = "The checkpoint is unharmed; mend the cause and restore again."


class GpuStateLost(NodeError):
    """Process {pid} ({comm}) of {container} did not get its GPU state back: {call} returned {code} ({name}). {what}"""

    exit_code = 34
    remedy = "The driver cannot bring this process back. Remove the container and restore an earlier checkpoint of it."


class Cancelled(NodeError):
    """{phase} was given up because {what}; what it had begun was undone."""

    exit_code = 35
    remedy = "Run the command again."


class DriverWorkerLost(NodeError):
    """The driver worker ended during {call} of process {pid}."""

    exit_code = 36
    remedy = "The steps before were undone. Look into the kernel log for messages of the NVIDIA driver, then try again."


class PreloadFailed(NodeError):
    """The preload library did not do {request}: {what}"""

    exit_code = 37
    remedy = "The steps before were undone. Run the command again; 'vgpu doctor CONTAINER' names what cannot be moved."


class GpuObjectBlocks(NodeError):
    """Process {pid} ({comm}) of {container} cannot be checkpointed: {what}"""

    exit_code = 38
    remedy = "'vgpu doctor CONTAINER' lists every blocking object with its remedy."


class InventoryMismatch(NodeError):
    """The GPU memory on {device} is not all accounted for: {what}"""

    exit_code = 40
    remedy = (
        "Nothing was taken away from the process. Please report this with the output of 'vgpu doctor CONTAINER --json'."
    )


class DeviceContentLost(NodeError):
    """The GPU memory of process {pid} ({comm}) of {container} is lost: {what}"""

    exit_code = 41
    remedy = "Remove the container and restore its last checkpoint."


class StagingWorkerLost(NodeError):
    """The staging worker ended during {verb}."""

    exit_code = 42
    remedy = "The steps before were undone. Look into the kernel log for messages of the NVIDIA driver or of the OOM killer, then try again."


class HostTieBlocks(NodeError):
    """Process {pid} ({comm}) of {container} cannot be checkpointed: it holds {what}"""

    exit_code = 44
    remedy = "'vgpu doctor CONTAINER' lists everything of this kind with its remedy."


class GroupIncomplete(NodeError):
    """The {verb} of group {group} waited {seconds} s for {missing} in vain: all containers of a group come to rest together."""

    exit_code = 45
    remedy = (
        "Start all their checkpoints at the same time, 'podman container checkpoint A & podman container checkpoint B & wait', "
        "or set 'group = alone' in /etc/vgpu/runtime.conf. Where one of them has failed by itself, its own error says why."
    )


class GroupMemberFailed(NodeError):
    """The {verb} of container {container} was given up with its group {group}, because that of container {member} failed: {what}"""

    exit_code = 46
    remedy = "The container goes on as before. See to the one that failed, then ask for all of the group again."


class StoreBusy(NodeError):
    """The store {root} was in use for {seconds} s."""

    exit_code = 43
    remedy = "Something is being brought in or removed there: run the command again."


class BuildFailed(NodeError):
    """Building {target} failed: {what}"""

    exit_code = 39
    remedy = "The compiler's own message stands above; 'make dev' installs the compiler that is known to work."


# ---- image: 50-69 --------------------------------------------------------------------------------


class ImageError(VgpuError):
    """{where}: {what}"""

    exit_code = 50
    remedy = "The checkpoint is damaged or was made by something else; take another copy."


class Truncated(ImageError):
    """{where} ends after {found} bytes where {needed} are needed."""

    exit_code = 51


class ContentMismatch(ImageError):
    """{where}: content differs from the signed digest ({what})"""

    exit_code = 52


class FormatTooNew(ImageError):
    """{where} has format version {found}; this version reads {known}."""

    exit_code = 53
    remedy = "Use a newer vgpu-snapshot on this node."


class UnknownFeature(ImageError):
    """{where} requires the feature {feature}, which this version does not know."""

    exit_code = 54
    remedy = "Use a newer vgpu-snapshot on this node."


class LimitExceeded(ImageError):
    """{where}: {what} is {found}, the limit is {limit}."""

    exit_code = 55


class UnsafeName(ImageError):
    """{where}: the file name {name} is not allowed in a checkpoint."""

    exit_code = 56


class UnexpectedEntry(ImageError):
    """{where}: {entry} {what}."""

    exit_code = 57
    remedy = "Something was added, removed or replaced after the checkpoint was sealed; take another copy."


class ContentElsewhere(ImageError):
    """{where} is a reference: {count} files of {size_bytes} bytes in all lie elsewhere, {what}"""

    exit_code = 58
    remedy = "On the node that made it 'vgpu unpack ARCHIVE -o WHOLE' makes an archive that needs no other; or 'vgpu pull' the checkpoint here first."


class Unsigned(ImageError):
    """{where} carries no signature."""

    exit_code = 60
    remedy = "Make the checkpoint through vgpu-runtime, which signs it, or relax /etc/vgpu/policy.json."


class UntrustedKey(ImageError):
    """{where} is signed by the key {key}, which this node does not trust."""

    exit_code = 61
    remedy = "If you trust its maker, copy that node's /etc/vgpu/node.pub here and run 'vgpu trust add node.pub'."


class BadSignature(ImageError):
    """{where}: the signature does not hold ({what})."""

    exit_code = 62
    remedy = "The checkpoint was changed after it was signed; take another copy."


class ConfigurationChanged(ImageError):
    """The container's configuration differs from the signed one: {what}"""

    exit_code = 63
    remedy = "Somebody changed the container's settings inside the archive; take an unchanged copy."


class Expired(ImageError):
    """{where}: the signature expired on {expires}."""

    exit_code = 64
    remedy = "Take a newer checkpoint, or have its maker sign this one again with 'vgpu sign --expires'."


class OlderGeneration(ImageError):
    """{where} is generation {generation} of container {container}, and this node has seen generation {newest} of it."""

    exit_code = 65
    remedy = (
        'If you want the older checkpoint, set "olderGeneration": "warn" in /etc/vgpu/policy.json and restore again.'
    )


class Undecryptable(ImageError):
    """{where} cannot be decrypted: {what}"""

    exit_code = 66
    remedy = "It was changed after it was encrypted, or it belongs to another image; take another copy."


class NotARecipient(ImageError):
    """{where} is encrypted to {recipients}, and no key given here opens it."""

    exit_code = 67
    remedy = "Give the private key of one of its recipients with --identity, or have it encrypted to yours."


# ---- registry: 70-79 (registry transfer) ---------------------------------------------------------


class RegistryError(VgpuError):
    """{where}: {what}"""

    exit_code = 70
    remedy = "Look at the registry's own log, or try again later."


class RegistryUnreachable(RegistryError):
    """{where} cannot be reached: {what}"""

    exit_code = 71
    remedy = "Check the name, the network, the proxy settings (HTTPS_PROXY, NO_PROXY) and the CA files in /etc/containers/certs.d."


class RegistryDenied(RegistryError):
    """{where} does not allow it: {what}"""

    exit_code = 72
    remedy = "Log in with 'podman login' as somebody who may, or ask the registry's administrator."


class NotInRegistry(RegistryError):
    """{where} has no {what}."""

    exit_code = 73
    remedy = "Check the reference; 'skopeo list-tags docker://REPOSITORY' lists what there is."


class RegistryContentWrong(RegistryError):
    """{where} sent other content than was asked for: {what}"""

    exit_code = 74
    remedy = "Nothing of it was used. Its storage or a proxy on the way is damaged; push the checkpoint again."


class RegistryAnswerInvalid(RegistryError):
    """{where} answered against the protocol: {what}"""

    exit_code = 75
    remedy = "Check that the host is an OCI registry and that no proxy answers in its place."


class RegistryRefused(RegistryError):
    """{where} refused it: {what}"""

    exit_code = 76
    remedy = "The registry's own message is above; its administrator knows its limits and quotas."


class RegistryGaveUp(RegistryError):
    """{where} did not do it in {attempts} attempts: {what}"""

    exit_code = 77
    remedy = "Run the command again later; it goes on where it was."


class CredentialHelperFailed(RegistryError):
    """The credential helper {helper} failed for {where}: {what}"""

    exit_code = 78
    remedy = "Run the helper by hand, or log in with 'podman login'."


# ---- runtime and engine: 80-89 -------------------------------------------------------------------


class RuntimeFailed(VgpuError):
    """{runtime} {verb} ended with status {status}: {what}"""

    exit_code = 80
    remedy = "The message above is the low-level runtime's own."


class EngineFailed(VgpuError):
    """{engine}: {what}"""

    exit_code = 81
    remedy = "The message above is the engine's own."
