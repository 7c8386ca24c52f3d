#!/bin/sh
# Turns a fresh set of namespaces into a machine: own root, /dev, /proc, /sys, one cgroup2 tree, hostname, loopback.
# Called by tests/hosts/host.py under `unshare` (mount, pid, uts, ipc, net); the second stage runs once more under
# `unshare --cgroup`, because a cgroup namespace's root is the cgroup its maker is in at that moment.
# Stage `thaw` sets free what is frozen in a host's cgroups, stage `clean` removes a dead host's cgroups.
# Arguments: STAGE ROOT-IMAGE MOUNT-POINT CGROUP-NAME HOST-NAME [BIND-SOURCE BIND-TARGET]...
set -eu
stage=$1 image=$2 here=$3 cgroup=$4 name=$5
script=$0

# A mount of cgroup2 from the first cgroup namespace sets the flags of the whole hierarchy: name those it has.
cgroup2_flags() {
    sed -n 's/^[^ ]* [^ ]* cgroup2 \([^ ]*\) .*/\1/p' /proc/self/mounts | head -n 1 | tr ',' '\n' |
        grep -xE 'nsdelegate|favordynmods|memory_localevents|memory_recursiveprot|memory_hugetlb_accounting|pids_localevents' |
        tr '\n' ','
}

# Every cgroup hierarchy of the machine, each mounted in this mount namespace only: v2, and v1's on hybrid machines.
# CRIU reads all of them from /proc/PID/cgroup, so a host needs a part of its own in each.
mount_hierarchies() {
    mkdir "$here/cgroups"
    while IFS=: read -r number controllers path; do
        if [ "$number" = 0 ]; then
            folder=$here/cgroups/unified
            mkdir "$folder"
            mount -t cgroup2 -o "$(cgroup2_flags)rw" cgroup2 "$folder"
        else
            folder=$here/cgroups/${controllers#name=}
            mkdir "$folder"
            mount -t cgroup -o "$controllers" cgroup "$folder" 2>/dev/null || continue
        fi
        echo "$folder${path%/}"
    done </proc/self/cgroup >"$here/hierarchies"
}

remove_tree() {
    find "$1" -depth -type d -exec rmdir {} + 2>/dev/null
}

# Empty cgroups of hosts whose maker was killed. Their names carry the maker's pid, seen in the outer /proc; they may
# lie elsewhere than ours, where the maker ran in another cgroup.
sweep_dead_hosts() {
    find "$here/cgroups" -maxdepth 5 -type d -name 'vgpu-host-*' -prune -print | while read -r old; do
        owner=${old##*/vgpu-host-}
        [ -d "/proc/${owner%%-*}" ] || remove_tree "$old" || true
    done
}

join_own_cgroups() {
    sweep_dead_hosts
    while read -r parent; do
        mkdir "$parent/$cgroup"
        if [ -e "$parent/cpuset.cpus" ] && [ -e "$parent/cgroup.clone_children" ]; then
            # v1 cpuset: a new cgroup takes no process before it has CPUs and memory nodes; children inherit these.
            cat "$parent/cpuset.cpus" >"$parent/$cgroup/cpuset.cpus"
            cat "$parent/cpuset.mems" >"$parent/$cgroup/cpuset.mems"
            echo 1 >"$parent/$cgroup/cgroup.clone_children"
        fi
        echo 0 >"$parent/$cgroup/cgroup.procs"
    done <"$here/hierarchies"
}

# A v1 freezer holds even the killed: what a test left frozen would never end.
thaw_own_cgroups() {
    mount_hierarchies
    while read -r parent; do
        find "$parent/$cgroup" -name freezer.state -exec sh -c 'for f; do echo THAWED >"$f"; done' sh {} + 2>/dev/null || true
        [ ! -e "$parent/$cgroup/cgroup.kill" ] || echo 1 >"$parent/$cgroup/cgroup.kill" || true
    done <"$here/hierarchies"
}

remove_own_cgroups() {
    mount_hierarchies
    while read -r parent; do
        for _ in 1 2 3 4 5 6 7 8 9 10; do # the kernel lets go of the dead a moment after they are reaped
            [ -d "$parent/$cgroup" ] || break
            remove_tree "$parent/$cgroup" && break
            sleep 0.1
        done
    done <"$here/hierarchies"
}

writable_root() {
    mkdir "$here/upper" "$here/work" "$here/root"
    if ! mount -t overlay -o "lowerdir=$image,upperdir=$here/upper,workdir=$here/work" overlay "$here/root" 2>/dev/null; then
        cp -a "$image/." "$here/root/"
        mount --bind "$here/root" "$here/root"
    fi
}

node() {
    mknod -m "$2" "$here/root/dev/$1" c "$3" "$4"
}

devices() {
    mount -t tmpfs -o mode=0755,size=64m tmpfs "$here/root/dev"
    mkdir "$here/root/dev/pts" "$here/root/dev/shm" "$here/root/dev/mqueue" "$here/root/dev/net"
    node null 666 1 3
    node zero 666 1 5
    node full 666 1 7
    node random 666 1 8
    node urandom 666 1 9
    node kmsg 600 1 11
    node tty 666 5 0
    node fuse 666 10 229
    node net/tun 666 10 200
    mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts "$here/root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$here/root/dev/shm"
    mount -t mqueue mqueue "$here/root/dev/mqueue" 2>/dev/null || true
    ln -s pts/ptmx "$here/root/dev/ptmx"
    ln -s /proc/self/fd "$here/root/dev/fd"
    ln -s /proc/self/fd/0 "$here/root/dev/stdin"
    ln -s /proc/self/fd/1 "$here/root/dev/stdout"
    ln -s /proc/self/fd/2 "$here/root/dev/stderr"
}

filesystems() {
    mount -t proc proc "$here/root/proc"
    mount -t sysfs sysfs "$here/root/sys"
    mount -t tmpfs -o mode=0755 tmpfs "$here/root/run"
    mount -t cgroup2 cgroup2 "$here/root/sys/fs/cgroup"
    # Container storage is an overlay of its own, whose upper directory cannot lie on the host's overlay.
    mkdir -p "$here/root/var/lib/containers" "$here/root/var/lib/containerd"
    mount -t tmpfs -o mode=0711 tmpfs "$here/root/var/lib/containers"
    mount -t tmpfs -o mode=0711 tmpfs "$here/root/var/lib/containerd"
}

# What containers-storage can use on these mounts; host.py writes it into storage.conf.
probe_storage() {
    probe=$here/root/var/lib/containers/probe
    mkdir "$probe" "$probe/lower" "$probe/upper" "$probe/work" "$probe/merged"
    if mount -t overlay -o "lowerdir=$probe/lower,upperdir=$probe/upper,workdir=$probe/work" overlay "$probe/merged" 2>/dev/null; then
        umount "$probe/merged"
        driver=overlay
    else
        driver=vfs
    fi
    rm -r "$probe"
    echo "$driver" >"$here/root/run/storage-driver"
}

# Where commands that come from outside join the host's cgroups (host.py writes their pid to the cgroup.procs here).
# Below the v2 root, because a cgroup with members cannot hand controllers down.
entrances() {
    mkdir "$here/root/sys/fs/cgroup/init.scope"
    echo 0 >"$here/root/sys/fs/cgroup/init.scope/cgroup.procs"
    while IFS=: read -r number controllers _; do
        [ "$number" != 0 ] || continue
        folder=$here/root/run/machine-cgroups/${controllers#name=}
        mkdir -p "$folder"
        # A leaf, in v1 too: CRIU takes all of the tree below a process's cgroup along and makes it anew below the
        # restored container's, so from the host's own cgroup each restore would double the tree.
        if mount -t cgroup -o "$controllers" cgroup "$folder" 2>/dev/null; then
            mkdir "$folder/init.scope"
            echo 0 >"$folder/init.scope/cgroup.procs"
        else
            rmdir "$folder"
        fi
    done </proc/self/cgroup
}

extra_binds() {
    while [ $# -ge 2 ]; do
        if [ -d "$1" ]; then
            mkdir -p "$here/root$2"
        else
            mkdir -p "$here/root${2%/*}"
            [ -e "$here/root$2" ] || : >"$here/root$2"
        fi
        mount --rbind "$1" "$here/root$2"
        shift 2
    done
}

private_mounts() {
    mount --make-rprivate /
    mount -t tmpfs -o mode=0755,size=90% tmpfs "$here"
}

first_stage() {
    private_mounts
    mount_hierarchies
    join_own_cgroups
    exec unshare --cgroup sh "$script" second "$@"
}

second_stage() {
    shift 4
    writable_root
    devices
    filesystems
    probe_storage
    entrances
    extra_binds "$@"
    hostname "$name" 2>/dev/null || echo "$name" >/proc/sys/kernel/hostname
    mkdir -p "$here/root/.outer"
    cd "$here/root"
    pivot_root . .outer
    umount -l /.outer
    rmdir /.outer
    cd /
    ip link set lo up # the root's own ip: the machine outside may have none
    echo ready
    # Adopts and reaps what the engines leave behind, as a machine's init does.
    exec /usr/bin/catatonit -P >/dev/null 2>&1
}

shift
case $stage in
first) first_stage "$@" ;;
second) second_stage "$@" ;;
thaw) private_mounts && thaw_own_cgroups ;;
clean) private_mounts && remove_own_cgroups ;;
esac
