"""The messages and services of containerd and of the CRI that are called here, in proto syntax (proto3).

Fields that nobody here reads or writes are left out: an unknown field is kept by the protobuf runtime. Enums are int32,
which is the same on the wire. Stable API of containerd 1.7 to 2.4 and of CRI v1. Pure data, read by `wire`.
"""

from __future__ import annotations

from containerd_integration.nri import definitions as nri

TYPES = """
message Descriptor { string media_type = 1; string digest = 2; int64 size = 3; map<string, string> annotations = 5; }
message Mount { string type = 1; string source = 2; string target = 3; repeated string options = 4; }
message Platform { string os = 1; string architecture = 2; string variant = 3; }
"""

CONTAINERS = """
message Runtime { string name = 1; google.protobuf.Any options = 2; }
message Container {
  string id = 1; map<string, string> labels = 2; string image = 3; Runtime runtime = 4; google.protobuf.Any spec = 5;
  string snapshotter = 6; string snapshot_key = 7; map<string, google.protobuf.Any> extensions = 10;
}
message GetContainerRequest { string id = 1; }
message GetContainerResponse { Container container = 1; }
message CreateContainerRequest { Container container = 1; }
message CreateContainerResponse { Container container = 1; }
message DeleteContainerRequest { string id = 1; }
service Containers {
  rpc Get(GetContainerRequest) returns (GetContainerResponse);
  rpc Create(CreateContainerRequest) returns (CreateContainerResponse);
  rpc Delete(DeleteContainerRequest) returns (google.protobuf.Empty);
}
"""

CONTENT = """
message Info { string digest = 1; int64 size = 2; map<string, string> labels = 5; }
message InfoRequest { string digest = 1; }
message InfoResponse { Info info = 1; }
message FieldMask { repeated string paths = 1; }
message UpdateRequest { Info info = 1; FieldMask update_mask = 2; }
message UpdateResponse { Info info = 1; }
message ReadContentRequest { string digest = 1; int64 offset = 2; int64 size = 3; }
message ReadContentResponse { int64 offset = 1; bytes data = 2; }
message WriteContentRequest {
  int32 action = 1; string ref = 2; int64 total = 3; string expected = 4; int64 offset = 5; bytes data = 6;
  map<string, string> labels = 7;
}
message WriteContentResponse { int32 action = 1; int64 offset = 4; int64 total = 5; string digest = 6; }
message AbortRequest { string ref = 1; }
service Content {
  rpc Info(InfoRequest) returns (InfoResponse);
  rpc Update(UpdateRequest) returns (UpdateResponse);
  rpc Read(ReadContentRequest) returns (stream ReadContentResponse);
  rpc Write(stream WriteContentRequest) returns (stream WriteContentResponse);
  rpc Abort(AbortRequest) returns (google.protobuf.Empty);
}
"""

DIFF = """
message ApplyRequest { containerd.types.Descriptor diff = 1; repeated containerd.types.Mount mounts = 2; }
message ApplyResponse { containerd.types.Descriptor applied = 1; }
message DiffRequest {
  repeated containerd.types.Mount left = 1; repeated containerd.types.Mount right = 2; string media_type = 3;
  string ref = 4; map<string, string> labels = 5;
}
message DiffResponse { containerd.types.Descriptor diff = 3; }
service Diff {
  rpc Apply(ApplyRequest) returns (ApplyResponse);
  rpc Diff(DiffRequest) returns (DiffResponse);
}
"""

IMAGES = """
message Image { string name = 1; map<string, string> labels = 2; containerd.types.Descriptor target = 3; }
message GetImageRequest { string name = 1; }
message GetImageResponse { Image image = 1; }
message CreateImageRequest { Image image = 1; }
message CreateImageResponse { Image image = 1; }
message DeleteImageRequest { string name = 1; bool sync = 2; }
service Images {
  rpc Get(GetImageRequest) returns (GetImageResponse);
  rpc Create(CreateImageRequest) returns (CreateImageResponse);
  rpc Delete(DeleteImageRequest) returns (google.protobuf.Empty);
}
"""

LEASES = """
message Lease { string id = 1; map<string, string> labels = 3; }
message CreateRequest { string id = 1; map<string, string> labels = 3; }
message CreateResponse { Lease lease = 1; }
message DeleteRequest { string id = 1; bool sync = 2; }
message ListRequest { repeated string filters = 1; }
message ListResponse { repeated Lease leases = 1; }
message Resource { string id = 1; string type = 2; }
message AddResourceRequest { string id = 1; Resource resource = 2; }
service Leases {
  rpc Create(CreateRequest) returns (CreateResponse);
  rpc Delete(DeleteRequest) returns (google.protobuf.Empty);
  rpc List(ListRequest) returns (ListResponse);
  rpc AddResource(AddResourceRequest) returns (google.protobuf.Empty);
}
"""

SNAPSHOTS = """
message PrepareSnapshotRequest { string snapshotter = 1; string key = 2; string parent = 3; map<string, string> labels = 4; }
message PrepareSnapshotResponse { repeated containerd.types.Mount mounts = 1; }
message ViewSnapshotRequest { string snapshotter = 1; string key = 2; string parent = 3; map<string, string> labels = 4; }
message ViewSnapshotResponse { repeated containerd.types.Mount mounts = 1; }
message MountsRequest { string snapshotter = 1; string key = 2; }
message MountsResponse { repeated containerd.types.Mount mounts = 1; }
message RemoveSnapshotRequest { string snapshotter = 1; string key = 2; }
message CommitSnapshotRequest { string snapshotter = 1; string name = 2; string key = 3; map<string, string> labels = 4; }
message StatSnapshotRequest { string snapshotter = 1; string key = 2; }
message Info { string name = 1; string parent = 2; int32 kind = 3; map<string, string> labels = 6; }
message StatSnapshotResponse { Info info = 1; }
service Snapshots {
  rpc Prepare(PrepareSnapshotRequest) returns (PrepareSnapshotResponse);
  rpc View(ViewSnapshotRequest) returns (ViewSnapshotResponse);
  rpc Mounts(MountsRequest) returns (MountsResponse);
  rpc Commit(CommitSnapshotRequest) returns (google.protobuf.Empty);
  rpc Remove(RemoveSnapshotRequest) returns (google.protobuf.Empty);
  rpc Stat(StatSnapshotRequest) returns (StatSnapshotResponse);
}
"""

TASK_TYPES = """
message Process { string container_id = 1; string id = 2; uint32 pid = 3; int32 status = 4; uint32 exit_status = 9; }
"""

TASKS = """
message CreateTaskRequest {
  string container_id = 1; repeated containerd.types.Mount rootfs = 3; string stdin = 4; string stdout = 5;
  string stderr = 6; bool terminal = 7; containerd.types.Descriptor checkpoint = 8; google.protobuf.Any options = 9;
}
message CreateTaskResponse { string container_id = 1; uint32 pid = 2; }
message StartRequest { string container_id = 1; string exec_id = 2; }
message StartResponse { uint32 pid = 1; }
message DeleteTaskRequest { string container_id = 1; }
message DeleteResponse { string id = 1; uint32 pid = 2; uint32 exit_status = 3; }
message GetRequest { string container_id = 1; string exec_id = 2; }
message GetResponse { containerd.v1.types.Process process = 1; }
message KillRequest { string container_id = 1; string exec_id = 2; uint32 signal = 3; bool all = 4; }
message PauseTaskRequest { string container_id = 1; }
message ResumeTaskRequest { string container_id = 1; }
message CheckpointTaskRequest { string container_id = 1; string parent_checkpoint = 2; google.protobuf.Any options = 3; }
message CheckpointTaskResponse { repeated containerd.types.Descriptor descriptors = 1; }
message WaitRequest { string container_id = 1; string exec_id = 2; }
message WaitResponse { uint32 exit_status = 1; }
service Tasks {
  rpc Create(CreateTaskRequest) returns (CreateTaskResponse);
  rpc Start(StartRequest) returns (StartResponse);
  rpc Delete(DeleteTaskRequest) returns (DeleteResponse);
  rpc Get(GetRequest) returns (GetResponse);
  rpc Kill(KillRequest) returns (google.protobuf.Empty);
  rpc Pause(PauseTaskRequest) returns (google.protobuf.Empty);
  rpc Resume(ResumeTaskRequest) returns (google.protobuf.Empty);
  rpc Checkpoint(CheckpointTaskRequest) returns (CheckpointTaskResponse);
  rpc Wait(WaitRequest) returns (WaitResponse);
}
"""

TRANSFER_TYPES = """
message RegistryResolver { string host_dir = 3; string default_scheme = 4; }
message OCIRegistry { string reference = 1; RegistryResolver resolver = 2; }
message UnpackConfiguration { containerd.types.Platform platform = 1; string snapshotter = 2; }
message ImageStore {
  string name = 1; map<string, string> labels = 2; repeated containerd.types.Platform platforms = 3;
  bool all_metadata = 4; repeated UnpackConfiguration unpacks = 10;
}
"""

TRANSFER = """
message TransferRequest { google.protobuf.Any source = 1; google.protobuf.Any destination = 2; }
service Transfer { rpc Transfer(TransferRequest) returns (google.protobuf.Empty); }
"""

VERSION = """
message VersionResponse { string version = 1; string revision = 2; }
service Version { rpc Version(google.protobuf.Empty) returns (VersionResponse); }
"""

RUNC = """
message Options {
  bool no_pivot_root = 1; bool no_new_keyring = 2; string shim_cgroup = 3; uint32 io_uid = 4; uint32 io_gid = 5;
  string binary_name = 6; string root = 7; bool systemd_cgroup = 9; string criu_image_path = 10;
  string criu_work_path = 11;
}
message CheckpointOptions {
  bool exit = 1; bool open_tcp = 2; bool external_unix_sockets = 3; bool terminal = 4; bool file_locks = 5;
  repeated string empty_namespaces = 6; string cgroups_mode = 7; string image_path = 8; string work_path = 9;
}
"""

CRI = """
message VersionRequest { string version = 1; }
message VersionResponse { string version = 1; string runtime_name = 2; string runtime_version = 3; }
message StatusRequest { bool verbose = 1; }
message StatusResponse { map<string, string> info = 2; }
message NamespaceOption { int32 network = 1; int32 pid = 2; int32 ipc = 3; string target_id = 4; }
message Int64Value { int64 value = 1; }
message LinuxSandboxSecurityContext { NamespaceOption namespace_options = 1; bool privileged = 6; }
message LinuxPodSandboxConfig { string cgroup_parent = 1; LinuxSandboxSecurityContext security_context = 2; }
message PodSandboxMetadata { string name = 1; string uid = 2; string namespace = 3; uint32 attempt = 4; }
message PodSandboxConfig {
  PodSandboxMetadata metadata = 1; string hostname = 2; string log_directory = 3; map<string, string> labels = 6;
  map<string, string> annotations = 7; LinuxPodSandboxConfig linux = 8;
}
message RunPodSandboxRequest { PodSandboxConfig config = 1; string runtime_handler = 2; }
message RunPodSandboxResponse { string pod_sandbox_id = 1; }
message StopPodSandboxRequest { string pod_sandbox_id = 1; }
message StopPodSandboxResponse { }
message RemovePodSandboxRequest { string pod_sandbox_id = 1; }
message RemovePodSandboxResponse { }
message ImageSpec { string image = 1; map<string, string> annotations = 2; string runtime_handler = 19; }
message KeyValue { string key = 1; string value = 2; }
message CriMount { string container_path = 1; string host_path = 2; bool readonly = 3; }
message Device { string container_path = 1; string host_path = 2; string permissions = 3; }
message CDIDevice { string name = 1; }
message LinuxContainerSecurityContext { bool privileged = 2; NamespaceOption namespace_options = 3; }
message LinuxContainerConfig { LinuxContainerSecurityContext security_context = 2; }
message ContainerMetadata { string name = 1; uint32 attempt = 2; }
message ContainerConfig {
  ContainerMetadata metadata = 1; ImageSpec image = 2; repeated string command = 3; repeated string args = 4;
  string working_dir = 5; repeated KeyValue envs = 6; repeated CriMount mounts = 7; repeated Device devices = 8;
  map<string, string> labels = 9; map<string, string> annotations = 10; string log_path = 11;
  LinuxContainerConfig linux = 15; repeated CDIDevice CDI_devices = 17;
}
message CreateContainerRequest { string pod_sandbox_id = 1; ContainerConfig config = 2; PodSandboxConfig sandbox_config = 3; }
message CreateContainerResponse { string container_id = 1; }
message StartContainerRequest { string container_id = 1; }
message StartContainerResponse { }
message StopContainerRequest { string container_id = 1; int64 timeout = 2; }
message StopContainerResponse { }
message RemoveContainerRequest { string container_id = 1; }
message RemoveContainerResponse { }
message ContainerStatusRequest { string container_id = 1; bool verbose = 2; }
message ContainerStatus { string id = 1; ContainerMetadata metadata = 2; int32 state = 3; string reason = 9; string message = 10; }
message ContainerStatusResponse { ContainerStatus status = 1; map<string, string> info = 2; }
message ExecSyncRequest { string container_id = 1; repeated string cmd = 2; int64 timeout = 3; }
message ExecSyncResponse { bytes stdout = 1; bytes stderr = 2; int32 exit_code = 3; }
message CheckpointContainerRequest { string container_id = 1; string location = 2; int64 timeout = 3; }
message CheckpointContainerResponse { }
message PullImageRequest { ImageSpec image = 1; }
message PullImageResponse { string image_ref = 1; }
service ImageService { rpc PullImage(PullImageRequest) returns (PullImageResponse); }
service RuntimeService {
  rpc Version(VersionRequest) returns (VersionResponse);
  rpc Status(StatusRequest) returns (StatusResponse);
  rpc RunPodSandbox(RunPodSandboxRequest) returns (RunPodSandboxResponse);
  rpc StopPodSandbox(StopPodSandboxRequest) returns (StopPodSandboxResponse);
  rpc RemovePodSandbox(RemovePodSandboxRequest) returns (RemovePodSandboxResponse);
  rpc CreateContainer(CreateContainerRequest) returns (CreateContainerResponse);
  rpc StartContainer(StartContainerRequest) returns (StartContainerResponse);
  rpc StopContainer(StopContainerRequest) returns (StopContainerResponse);
  rpc RemoveContainer(RemoveContainerRequest) returns (RemoveContainerResponse);
  rpc ContainerStatus(ContainerStatusRequest) returns (ContainerStatusResponse);
  rpc ExecSync(ExecSyncRequest) returns (ExecSyncResponse);
  rpc CheckpointContainer(CheckpointContainerRequest) returns (CheckpointContainerResponse);
}
"""

# In an order in which a package stands behind those that it names.
PACKAGES = {
    "containerd.types": TYPES,
    "containerd.v1.types": TASK_TYPES,
    "containerd.types.transfer": TRANSFER_TYPES,
    "containerd.runc.v1": RUNC,
    "containerd.services.containers.v1": CONTAINERS,
    "containerd.services.content.v1": CONTENT,
    "containerd.services.diff.v1": DIFF,
    "containerd.services.images.v1": IMAGES,
    "containerd.services.leases.v1": LEASES,
    "containerd.services.snapshots.v1": SNAPSHOTS,
    "containerd.services.tasks.v1": TASKS,
    "containerd.services.transfer.v1": TRANSFER,
    "containerd.services.version.v1": VERSION,
    "runtime.v1": CRI,
    **nri.PACKAGES,
}
