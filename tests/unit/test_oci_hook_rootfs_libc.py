"""Which C library an image's program runs on, and that a hostile image leads nowhere else."""

import os

import pytest

from oci_hook.rootfs_libc import GLIBC, MUSL, find_libc, tree_of
from tests.simulators.shim_install import elf

GLIBC_LOADER = "/lib64/ld-linux-x86-64.so.2"
MUSL_LOADER = "/lib/ld-musl-x86_64.so.1"


@pytest.fixture
def rootfs(tmp_path):
    root = tmp_path / "bundle" / "rootfs"
    for folder in ("bin", "lib", "lib64", "usr/bin"):
        (root / folder).mkdir(parents=True)
    return root


def find(rootfs, args, *, env=(), cwd="/", mounts=()):
    spec = {"root": {"path": "rootfs"}, "mounts": list(mounts)}
    return find_libc(tree_of(spec, str(rootfs.parent)), {"args": args, "env": list(env), "cwd": cwd})


@pytest.mark.parametrize(
    ("loader", "libc"),
    [
        (GLIBC_LOADER, GLIBC),
        ("/lib/ld-linux-aarch64.so.1", GLIBC),
        ("/nix/store/x-glibc-2.40/lib/ld-linux-x86-64.so.2", GLIBC),
        ("/lib64/ld-2.31.so", GLIBC),
        (MUSL_LOADER, MUSL),
        ("/system/bin/linker64", None),
        (None, None),
    ],
)
def test_the_programs_loader_decides(rootfs, loader, libc):
    (rootfs / "bin/app").write_bytes(elf(loader))
    assert find(rootfs, ["/bin/app"]).libc == libc


def test_a_program_is_found_through_the_containers_path(rootfs):
    (rootfs / "usr/bin/app").write_bytes(elf(MUSL_LOADER))
    assert find(rootfs, ["app"], env=["PATH=/nowhere:/usr/bin"]).libc == MUSL
    assert find(rootfs, ["app"], env=["PATH=/nowhere"]).libc is None
    assert find(rootfs, ["app"]).libc == MUSL


def test_a_relative_program_starts_at_cwd(rootfs):
    (rootfs / "usr/bin/app").write_bytes(elf(MUSL_LOADER))
    assert find(rootfs, ["./app"], cwd="/usr/bin").libc == MUSL


def test_a_script_has_the_libc_of_its_interpreter(rootfs):
    (rootfs / "bin/sh").write_bytes(elf(GLIBC_LOADER))
    (rootfs / "bin/start").write_bytes(b"#! /bin/sh -e\necho\n")
    found = find(rootfs, ["/bin/start"])
    assert (found.libc, found.reason) == (GLIBC, f"loader {GLIBC_LOADER}")


def test_a_script_that_interprets_itself_ends(rootfs):
    (rootfs / "bin/loop").write_bytes(b"#!/bin/loop\n")
    assert find(rootfs, ["/bin/loop"]).libc is None


def test_a_static_first_program_leaves_it_to_the_shell(rootfs):
    (rootfs / "bin/init").write_bytes(elf(None))
    (rootfs / "bin/sh").write_bytes(elf(MUSL_LOADER))
    found = find(rootfs, ["/bin/init", "--", "/bin/app"])
    assert found.libc == MUSL
    assert "statically linked" in found.reason


def test_without_a_shell_the_only_loader_decides(rootfs):
    (rootfs / "bin/init").write_bytes(elf(None))
    assert find(rootfs, ["/bin/init"]).libc is None
    (rootfs / "lib/ld-musl-x86_64.so.1").write_bytes(b"")
    assert find(rootfs, ["/bin/init"]).libc == MUSL
    (rootfs / "lib64/ld-linux-x86-64.so.2").write_bytes(b"")
    assert find(rootfs, ["/bin/init"]).libc is None


def test_another_architecture_gets_no_preload_even_if_the_shell_would(rootfs):
    (rootfs / "bin/sh").write_bytes(elf(GLIBC_LOADER))
    (rootfs / "bin/app").write_bytes(elf(GLIBC_LOADER, machine=243))
    assert find(rootfs, ["/bin/app"]).libc is None
    (rootfs / "bin/app32").write_bytes(b"\x7fELF\x01" + elf(GLIBC_LOADER)[5:])
    assert find(rootfs, ["/bin/app32"]).libc is None


def test_a_merged_usr_image_is_followed(rootfs):
    (rootfs / "bin").rmdir()
    (rootfs / "bin").symlink_to("usr/bin")
    (rootfs / "usr/bin/app").write_bytes(elf(MUSL_LOADER))
    (rootfs / "usr/bin/alias").symlink_to("/bin/app")
    assert find(rootfs, ["/bin/alias"]).libc == MUSL


@pytest.mark.parametrize("target", ["/../../../../outside", "../../../outside", "/outside"])
def test_links_stay_in_the_image(rootfs, target):
    outside = rootfs.parent.parent / "outside"
    outside.write_bytes(elf(MUSL_LOADER))
    (rootfs / "bin/app").symlink_to(target)
    assert find(rootfs, ["/bin/app"]).libc is None
    assert find(rootfs, ["/../../outside"]).libc is None


def test_a_link_to_a_host_path_means_the_images_own(rootfs):
    (rootfs / "etc").mkdir()
    (rootfs / "etc/passwd").write_bytes(elf(MUSL_LOADER))
    (rootfs / "bin/app").symlink_to("/etc/passwd")
    assert find(rootfs, ["/bin/app"]).libc == MUSL


def test_circles_and_special_files_are_refused(rootfs):
    (rootfs / "bin/a").symlink_to("b")
    (rootfs / "bin/b").symlink_to("a")
    os.mkfifo(rootfs / "bin/pipe")
    for name in ("/bin/a", "/bin/pipe", "/bin"):
        assert find(rootfs, [name]).libc is None


def test_a_program_in_a_bind_mount_is_found_there(rootfs, tmp_path):
    (tmp_path / "host-usr/bin").mkdir(parents=True)
    (tmp_path / "host-usr/bin/python3").write_bytes(elf(GLIBC_LOADER))
    mount = {"destination": "/usr", "type": "bind", "source": str(tmp_path / "host-usr"), "options": ["rbind"]}
    assert find(rootfs, ["/usr/bin/python3"], mounts=[mount]).libc == GLIBC


def test_a_mounted_file_is_found_and_a_tmpfs_hides(rootfs, tmp_path):
    (tmp_path / "catatonit").write_bytes(elf(MUSL_LOADER))
    mount = {"destination": "/run/podman-init", "type": "bind", "source": str(tmp_path / "catatonit")}
    assert find(rootfs, ["/run/podman-init"], mounts=[mount]).libc is None  # no /run to mount on
    (rootfs / "run").mkdir()
    assert find(rootfs, ["/run/podman-init"], mounts=[mount]).libc == MUSL
    (rootfs / "usr/bin/app").write_bytes(elf(MUSL_LOADER))
    (tmp_path / "link").symlink_to("catatonit")
    assert find(rootfs, ["/run/podman-init"], mounts=[{**mount, "source": str(tmp_path / "link")}]).libc == MUSL
    hidden = {"destination": "/usr", "type": "tmpfs", "source": "tmpfs"}
    assert find(rootfs, ["/usr/bin/app"], mounts=[hidden]).libc is None


@pytest.mark.parametrize(
    "head", [b"", b"\x7fELF", b"#!", b"#!\n", b"text", elf(GLIBC_LOADER)[:64], elf(GLIBC_LOADER)[:100]]
)
def test_damaged_programs_are_no_reason_to_fail(rootfs, head):
    (rootfs / "bin/app").write_bytes(head)
    assert find(rootfs, ["/bin/app"]).libc is None


def test_a_huge_program_header_count_is_bounded(rootfs):
    head = bytearray(elf(None))
    head[54:56] = (0).to_bytes(2, "little")
    head[56:58] = (0xFFFF).to_bytes(2, "little")
    head[32:40] = (2**63).to_bytes(8, "little")
    (rootfs / "bin/app").write_bytes(head)
    assert find(rootfs, ["/bin/app"]).libc is None


@pytest.mark.parametrize("process", [{}, {"args": []}, {"args": [""]}, {"args": ["sh"], "env": None}])
def test_an_odd_process_is_no_reason_to_fail(rootfs, process):
    assert find_libc(tree_of({"root": None}, str(rootfs.parent)), process).libc is None
