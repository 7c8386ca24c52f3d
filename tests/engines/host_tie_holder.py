"""Runs in a container: holds the things named on its command line, checks all of them every 50 ms, writes a step to /tmp/held.

Standard library of the host's Python only. A check that fails ends the program. Started by test_host_ties.py.
"""

import ctypes
import fcntl
import mmap
import os
import socket
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
SIZE = 2 << 20
SYSCALLS = {"perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "memfd_secret": 447}
checks = []
keep = []


def content(seed):
    return (seed * (SIZE // len(seed) + 1))[:SIZE]


def mapped(fd, seed):
    os.posix_fallocate(fd, 0, SIZE)
    view = mmap.mmap(fd, SIZE)
    view[:] = content(seed)
    checks.append(lambda: view[:] == content(seed))


def talk(one, other):
    def check():
        one.sendall(b"there")
        other.sendall(b"back")
        return other.recv(5) == b"there" and one.recv(4) == b"back"

    keep.extend((one, other))
    checks.append(check)


def called(name, *arguments):
    result = libc.syscall(SYSCALLS[name], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    keep.append(result)


def tcp():
    listener = socket.create_server(("127.0.0.1", 0))
    keep.append(listener)
    near = socket.create_connection(listener.getsockname())
    parent = os.getpid()
    if os.fork() == 0:  # the other end is another process's
        far, _ = listener.accept()
        near.close()
        while os.getppid() == parent and (data := far.recv(64)):
            far.sendall(data)
        os._exit(0)

    def check():
        near.sendall(b"echo")
        return near.recv(4) == b"echo"

    checks.append(check)


def waiting():
    listener = socket.create_server(("127.0.0.1", 0))
    keep.extend((listener, socket.create_connection(listener.getsockname())))


def unix_inside():
    talk(*socket.socketpair())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0ties")
    listener.listen()
    near = socket.socket(socket.AF_UNIX)
    near.connect("\0ties")
    keep.append(listener)
    talk(near, listener.accept()[0])


def unix():
    end = socket.socket(socket.AF_UNIX)
    end.connect("/ties/outside")
    keep.append(end)


def shm():
    mapped(os.open("/dev/shm/kept", os.O_CREAT | os.O_RDWR), b"kept")


def deleted():
    fd = os.open("/dev/shm/nccl-AbCdEf", os.O_CREAT | os.O_RDWR)
    mapped(fd, b"gone")
    os.close(fd)
    os.unlink("/dev/shm/nccl-AbCdEf")


def memfd():
    mapped(os.memfd_create("memory"), b"memory")


def sysv():
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(libc.shmget(0, SIZE, 0o1600), None, 0)
    ctypes.memmove(address, content(b"sysv"), SIZE)
    checks.append(lambda: ctypes.string_at(address, SIZE) == content(b"sysv"))


def semaphore():
    libc.sem_open.restype = ctypes.c_void_p
    keep.append(libc.sem_open(b"/ties", os.O_CREAT, 0o600, 1))


def lock():
    file, other = (os.open("/tmp/lock", os.O_CREAT | os.O_RDWR) for _ in range(2))
    fcntl.flock(file, fcntl.LOCK_EX)

    def check():
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    keep.append(file)
    checks.append(check)


def pidfd():
    keep.append(os.pidfd_open(os.getpid()))


def watch():
    fd = libc.inotify_init1(os.O_NONBLOCK)
    libc.inotify_add_watch(fd, b"/dev/shm", 0x100)  # IN_CREATE
    count = [0]

    def check():
        count[0] += 1
        name = f"/dev/shm/seen-{count[0]}"
        open(name, "w").close()
        os.unlink(name)
        return len(os.read(fd, 4096)) > 0

    checks.append(check)


def io_uring():
    called("io_uring_setup", 4, ctypes.create_string_buffer(256))


def perf():
    attributes = ctypes.create_string_buffer(128)
    ctypes.memmove(attributes, (1).to_bytes(4, "little") + (128).to_bytes(4, "little"), 8)
    called("perf_event_open", attributes, 0, -1, -1, 0)


def userfaultfd():
    called("userfaultfd", 1)


def secret():
    called("memfd_secret", 0)


def fuse():
    keep.append(os.open("/dev/fuse", os.O_RDWR))


for name in sys.argv[1:]:
    globals()[name]()
step = 0
while True:
    for number, check in enumerate(checks):
        assert check(), number
    step += 1
    with open("/tmp/held", "a") as out:
        out.write(f"step {step} held ok\n")
    time.sleep(0.05)
