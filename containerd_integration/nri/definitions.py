"""The messages and services of NRI v1alpha1 and of ttrpc that are used here, in proto syntax (proto3).

Fields that nobody here reads or writes are left out: an unknown field is kept by the protobuf runtime. Enums are int32,
which is the same on the wire. Pure data; `containerd_integration.api.wire` makes classes of it.
"""

from __future__ import annotations

TTRPC = """
message KeyValue { string key = 1; string value = 2; }
message Request {
  string service = 1; string method = 2; bytes payload = 3; int64 timeout_nano = 4; repeated KeyValue metadata = 5;
}
message Status { int32 code = 1; string message = 2; }
message Response { Status status = 1; bytes payload = 2; }
"""

NRI = """
message Empty { }
message RegisterPluginRequest { string plugin_name = 1; string plugin_idx = 2; string NRI_version = 3; }
message ConfigureRequest {
  string config = 1; string runtime_name = 2; string runtime_version = 3; int64 registration_timeout = 4;
  int64 request_timeout = 5; string NRI_version = 6;
}
message ConfigureResponse { int32 events = 2; }
message PodSandbox {
  string id = 1; string name = 2; string namespace = 4; map<string, string> annotations = 6; string runtime_handler = 7;
}
message Mount { string destination = 1; string type = 2; string source = 3; repeated string options = 4; }
message Hook { string path = 1; repeated string args = 2; repeated string env = 3; }
message Hooks {
  repeated Hook prestart = 1; repeated Hook create_runtime = 2; repeated Hook create_container = 3;
  repeated Hook start_container = 4; repeated Hook poststart = 5; repeated Hook poststop = 6;
}
message LinuxDevice { string path = 1; string type = 2; int64 major = 3; int64 minor = 4; }
message LinuxContainer { repeated LinuxDevice devices = 2; string cgroups_path = 5; }
message CDIDevice { string name = 1; }
message Container {
  string id = 1; string pod_sandbox_id = 2; string name = 3; int32 state = 4; map<string, string> labels = 5;
  map<string, string> annotations = 6; repeated string args = 7; repeated string env = 8; repeated Mount mounts = 9;
  Hooks hooks = 10; LinuxContainer linux = 11; uint32 pid = 12; repeated CDIDevice CDI_devices = 20;
}
message SynchronizeRequest { repeated PodSandbox pods = 1; repeated Container containers = 2; bool more = 3; }
message SynchronizeResponse { bool more = 2; }
message KeyValue { string key = 1; string value = 2; }
message ContainerAdjustment {
  map<string, string> annotations = 2; repeated Mount mounts = 3; repeated KeyValue env = 4;
}
message CreateContainerRequest { PodSandbox pod = 1; Container container = 2; }
message CreateContainerResponse { ContainerAdjustment adjust = 1; }
message StateChangeEvent { int32 event = 1; PodSandbox pod = 2; Container container = 3; }
message RemoveContainerRequest { PodSandbox pod = 1; Container container = 2; }
message RemoveContainerResponse { }
message PostStartContainerRequest { PodSandbox pod = 1; Container container = 2; }
message PostStartContainerResponse { }
"""

PACKAGES = {"ttrpc": TTRPC, "nri.pkg.api.v1alpha1": NRI}
