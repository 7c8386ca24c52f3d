"""Makes archives that are whole and signed but for one trick each, for test_archive_hardening.py.

The headers are written by hand where Python's tarfile would not write them. A trick is put at the end of the members, so
that everything a verification needs is there and only the trick can be the reason for a refusal.
"""

import struct

from tests.format.make_vectors import (
    FIFO,
    FOLDER,
    SMALL_CHUNK,
    HardLink,
    Link,
    Sealed,
    base_files,
    inside,
    make_tar,
    outside,
)

BLOCK = 512
SEALED = Sealed(base_files(), chunk_size=SMALL_CHUNK).all(base_files())
# The last member ends in a block that is not empty, so that the end of the archive can be found.
WHOLE = [*inside(SEALED), *outside(), ("network.status", b"{}")]
END = bytes(2 * BLOCK)
NAME = "core-1.img"


def octal(value, size):
    return f"{value:0{size - 1}o}\0".encode()


def header(name, size=0, kind=b"0", link=b"", *, size_field=None, magic=b"ustar\x0000", device=(0, 0)):
    """One header block with a right checksum, whatever else is wrong with it."""
    fields = struct.pack(
        "100s8s8s8s12s12s8s1s100s8s32s32s8s8s155s12x",
        name if isinstance(name, bytes) else name.encode(), octal(0o600, 8), octal(0, 8), octal(0, 8),
        octal(size, 12) if size_field is None else size_field, octal(0, 12), b" " * 8, kind, link, magic, b"", b"",
        octal(device[0], 8), octal(device[1], 8), b"",
    )  # fmt: skip
    return fields[:148] + f"{sum(fields):06o}\0 ".encode() + fields[156:]


def member(name, data=b"", **more):
    return header(name, len(data), **more) + data + bytes(-len(data) % BLOCK)


def pax(records, kind=b"x"):
    """An extended header for the member that follows."""
    text = b""
    for key, value in records.items():
        pair = key.encode() + b"=" + (value if isinstance(value, bytes) else value.encode()) + b"\n"
        length = len(pair) + 2
        while len(str(length)) + 1 + len(pair) != length:
            length += 1
        text += str(length).encode() + b" " + pair
    return member("PaxHeaders/x", text, kind=kind)


def gnu_long_name(name):
    return member("././@LongLink", name + b"\0", kind=b"L")


def base256(value):
    return b"\x80" + value.to_bytes(11, "big")


def with_last(*blocks):
    """The whole archive with these blocks before its end."""
    data = make_tar(WHOLE)
    at = len(data)
    while not any(data[at - BLOCK : at]):
        at -= BLOCK
    return data[:at] + b"".join(blocks) + END


def with_members(*members):
    return make_tar(WHOLE + list(members))


def replaced(name, content):
    return make_tar([(at, content if at == f"checkpoint/{name}" else data) for at, data in WHOLE])


# What is tried -> the archive. Every one of them must be refused with an error of ours.
TRICKS = {
    "an absolute name": with_last(member("/etc/passwd", b"x")),
    "an absolute name below checkpoint": with_last(member("checkpoint//etc/passwd", b"x")),
    "two dots": with_last(member("../evil", b"x")),
    "two dots below checkpoint": with_last(member("checkpoint/../../evil", b"x")),
    "two dots at the end": with_last(header("checkpoint/..", kind=b"5")),
    "a symbolic link": with_members(("checkpoint/evil.img", Link("/etc/passwd"))),
    "a symbolic link in place of a sealed file": replaced(NAME, Link("/etc/passwd")),
    "a hard link to a sealed file": with_members(("checkpoint/evil.img", HardLink("checkpoint/" + NAME))),
    "a hard link to outside": with_members(("checkpoint/evil.img", HardLink("../../etc/passwd"))),
    "a hard link in place of a sealed file": replaced(NAME, HardLink("spec.dump")),
    "a symbolic link in place of the folder": make_tar([("checkpoint", Link("/etc")), *WHOLE[1:]]),
    "a file in place of the folder": make_tar([("checkpoint", b"x"), *WHOLE[1:]]),
    "a symbolic link that replaces the folder at the end": with_members(("checkpoint", Link("/etc"))),
    "a character device": with_last(header("checkpoint/evil", kind=b"3", device=(1, 5))),
    "a block device": with_last(header("checkpoint/evil", kind=b"4", device=(8, 0))),
    "a pipe": with_members(("checkpoint/evil", FIFO)),
    "a folder": with_members(("checkpoint/folder", FOLDER)),
    "a folder in place of a sealed file": replaced(NAME, FOLDER),
    "a sealed file twice": with_members((f"checkpoint/{NAME}", SEALED[NAME])),
    "a sealed file twice, with other content": with_members((f"checkpoint/{NAME}", b"other")),
    "a sealed file twice under another spelling": with_last(member(f"./checkpoint/./{NAME}", SEALED[NAME])),
    "a document twice": with_members(("checkpoint/vgpu-record.json", SEALED["vgpu-record.json"])),
    "spec.dump twice": with_members(("spec.dump", b"{}")),
    "spec.dump twice under another spelling": with_last(member("./spec.dump", b"{}")),
    "a file that is not sealed": with_members(("checkpoint/evil.img", b"x")),
    "a file of another case": with_members((f"checkpoint/{NAME.upper()}", SEALED[NAME])),
    "a checkpoint in the checkpoint": with_members((f"checkpoint/checkpoint/{NAME}", SEALED[NAME])),
    "a long name": with_last(gnu_long_name(b"checkpoint/" + b"n" * 300), member("checkpoint/short", b"x")),
    "a very long name": with_last(gnu_long_name(b"n" * 5000), member("short", b"x")),
    "an endless name": with_last(header("././@LongLink", kind=b"L", size_field=base256(1 << 40))),
    "a long name that leads outside": with_last(gnu_long_name(b"checkpoint/../../evil"), member("checkpoint/a", b"x")),
    "a long name of a sealed file": with_last(gnu_long_name(f"checkpoint/{NAME}".encode()), member("harmless", b"x")),
    "a pax path that leads outside": with_last(pax({"path": "checkpoint/../../evil"}), member("checkpoint/a", b"x")),
    "an absolute pax path": with_last(pax({"path": "/etc/passwd"}), member("checkpoint/a", b"x")),
    "a pax path of a sealed file": with_last(pax({"path": f"checkpoint/{NAME}"}), member("harmless", b"x")),
    "a pax path with a NUL": with_last(pax({"path": b"checkpoint/a\0b"}), member("checkpoint/a", b"x")),
    "an empty pax path": with_last(pax({"path": ""}), member("checkpoint/a", b"x")),
    "a pax path for every member": with_last(pax({"path": "checkpoint/a"}, kind=b"g"), member("checkpoint/b", b"x")),
    "a pax size for every member": with_last(pax({"size": "0"}, kind=b"g"), member("a", b"x")),
    "a pax size that is no number": with_last(pax({"size": "-1"}), member("checkpoint/a", b"x")),
    "a pax size above all": with_last(pax({"size": "9" * 18}), member("checkpoint/a", b"x")),
    "a pax header without an end": with_last(header("x", size=100, kind=b"x"), b"99 path=a" + bytes(503)),
    "a sparse member": with_last(header("checkpoint/a", kind=b"S", magic=b"ustar  \0")),
    "a sparse pax member": with_last(pax({"GNU.sparse.major": "1", "GNU.sparse.size": "9"}), member("checkpoint/a", b"x")),
    "a huge size": with_last(header("checkpoint/evil", size_field=base256(1 << 61))),
    "an absurd size": with_last(header("checkpoint/evil", size_field=base256(1 << 80))),
    "a negative size": with_last(header("checkpoint/evil", size_field=b"\xff" * 12)),
    "the largest octal size": with_last(header("checkpoint/evil", size_field=b"777777777777")),
    "a size that is no number": with_last(header("checkpoint/evil", size_field=b"12x\0        ")),
    "a folder with data": with_last(header("folder", 512, kind=b"5"), bytes(512)),
    "a link with data": with_last(header("link", 512, kind=b"2", link=b"a"), bytes(512)),
    "a file that its name makes a folder": with_last(member("checkpoint/folder/", b"")),
    "a member of unknown type": with_last(header("checkpoint/a", kind=b"V")),
    "a wrong checksum": with_last(b"checkpoint/a".ljust(148, b"\0") + b"0000001\0".ljust(364, b"0")),
    "one empty block amid the members": with_last(bytes(BLOCK), member("a", b"x")),
    "members behind the end": make_tar(WHOLE) + member("checkpoint/evil.img", b"x") + END,
    "data behind the end": make_tar(WHOLE) + b"x" * BLOCK,
    "no end": make_tar(WHOLE)[:-BLOCK].rstrip(b"\0"),
    "a name with a control character": with_last(member("a\nb", b"x")),
    "a name with a backslash": with_last(member("checkpoint/..\\evil", b"x")),
    "a name that is no UTF-8": with_last(member(b"checkpoint/\xff\xfe", b"x")),
    "a name with letters beyond ASCII": with_last(member("checkpoint/caf\u00e9.img", b"x")),
    "a hidden name": with_last(member("checkpoint/.evil", b"x")),
    "an empty name": with_last(header("")),
    "only dots": with_last(member("./.", b"x")),
    "a partial file of the seal": with_last(member("checkpoint/.vgpu-partial-x", b"x")),
    "half of it": make_tar(WHOLE)[: len(make_tar(WHOLE)) // 2],
    "nothing": b"",
    "one block": make_tar(WHOLE)[:BLOCK],
}  # fmt: skip
