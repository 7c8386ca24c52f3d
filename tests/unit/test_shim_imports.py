"""What a call loads: it runs at every container start, and each import is paid there (bench/shim_passthrough.py)."""

import json
import subprocess
import sys

import pytest

from tests.simulators.shim_install import ROOT, ShimInstall, cpu_spec

# What the interpreter loads by itself with -IS, and `os` with its parts; frozen in every supported version.
ALWAYS = {
    "__future__",
    "os",
    "stat",
    "_stat",
    "posixpath",
    "genericpath",
    "_collections_abc",
    "os.path",
    "errno",  # built in; posixpath imports it from Python 3.13 on
}
PASS_THROUGH = {
    "oci_hook",
    "oci_hook.settings",
    "runtime_shim",
    "runtime_shim.arguments",
    "runtime_shim.low_level",
    "runtime_shim.main",
}
CREATE_WITHOUT_GPU = PASS_THROUGH | {
    "oci_hook.bundle_file",
    "oci_hook.control_directory",
    "oci_hook.gpu_detection",
    "oci_hook.injection",
    "runtime_shim.create",
    "runtime_shim.injection",
}
# json brings re, enum and functools along; supervise adds ctypes and signal.
CREATE_WITH_GPU_FIRST_NAMES = {
    "_collections",
    "_ctypes",
    "_functools",
    "_json",
    "_sre",
    "_struct",
    "_operator",
    "collections",
    "copyreg",
    "ctypes",
    "enum",
    "functools",
    "itertools",
    "json",
    "keyword",
    "oci_hook",
    "operator",
    "re",
    "reprlib",
    "runtime_shim",
    "select",
    "time",
    "signal",
    "struct",
    "types",
    "vgpu_errors",
}
NEVER = {
    "argparse",
    "dataclasses",
    "logging",
    "pathlib",
    "shutil",
    "subprocess",
    "tempfile",
    "typing",
    "socket",
    "datetime",
}


def loaded_by(install, *words):
    """Modules loaded when the process becomes the low-level runtime or returns, less those of the bare interpreter."""
    code = (
        f"import sys\nbefore = set(sys.modules)\nsys.path.insert(0, {str(ROOT)!r})\n"
        "def tell():\n"
        "    names = sorted(set(sys.modules) - before)\n"
        f"    open({str(install.folder / 'modules')!r}, 'w').write('\\n'.join(names))\n"
        "from runtime_shim import main, low_level\n"
        "def stop(*_):\n"
        "    tell()\n"
        "    sys.exit(0)\n"
        "low_level.os.execv = stop\n"
        f"main.main({[install.runtime, *map(str, words)]!r}, {str(install.folder / 'runtime.conf')!r})\n"
        "tell()\n"
    )
    subprocess.run([sys.executable, "-IS", "-c", code], check=True, timeout=60, env={}, cwd=install.folder)
    return set((install.folder / "modules").read_text().split()) - ALWAYS


@pytest.fixture
def install(tmp_path):
    return ShimInstall(tmp_path)


@pytest.mark.parametrize("words", [["kill", "c1", "9"], ["start", "c1"], ["--version"], ["checkpoint", "--help"]])
def test_a_call_that_passes_through_loads_exactly_this(install, words):
    assert loaded_by(install, *words) == PASS_THROUGH


def test_delete_and_exec_of_other_containers_load_little_more(install):
    assert loaded_by(install, "delete", "c1") == PASS_THROUGH | {"oci_hook.control_directory", "runtime_shim.delete"}
    assert loaded_by(install, "exec", "--process", "/p", "c1") == PASS_THROUGH | {
        "oci_hook.control_directory",
        "runtime_shim.exec_verb",
    }


def test_create_without_gpu_loads_exactly_this(install):
    bundle = install.bundle(spec=cpu_spec())
    assert loaded_by(install, "create", "--bundle", bundle, "c1") == CREATE_WITHOUT_GPU


def test_create_with_gpu_stays_in_the_small_part_of_the_standard_library(install):
    loaded = loaded_by(install, "create", "--bundle", install.bundle(), "c1")
    assert "json" in loaded
    assert "runtime_shim.supervise" in loaded
    extra = {name.partition(".")[0] for name in loaded - CREATE_WITHOUT_GPU}
    assert extra <= CREATE_WITH_GPU_FIRST_NAMES
    assert not loaded & NEVER


def test_the_hooks_precreate_loads_no_json_without_gpu(tmp_path):
    install = ShimInstall(tmp_path)
    bundle = install.bundle("c7", podman=True)
    code = (
        f"import sys\nbefore = set(sys.modules)\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from oci_hook.main import main\n"
        f"main(['vgpu-hook', 'precreate'], {str(install.folder / 'runtime.conf')!r})\n"
        "print('\\n' + '\\n'.join(sorted(set(sys.modules) - before)))\n"
    )
    config = json.dumps(cpu_spec()).encode()
    done = subprocess.run(
        [sys.executable, "-IS", "-c", code], input=config, capture_output=True, check=True, cwd=bundle, timeout=60
    )
    modules = set(done.stdout.decode().partition("\n")[2].split()) - ALWAYS
    assert modules == {
        "oci_hook",
        "oci_hook.control_directory",
        "oci_hook.gpu_detection",
        "oci_hook.injection",
        "oci_hook.main",
        "oci_hook.settings",
    }
