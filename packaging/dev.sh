#!/bin/sh
# Makes the development environment: system packages where they are missing and may be installed, then .venv.
# Called by `make dev` and, through the stamp .venv/ready, by every target that needs it. Says what it does.
set -eu
cd "$(dirname "$0")/.."

say() { echo "dev: $*"; }
fail() {
    echo "dev: $*" >&2
    exit 1
}

# command-or-file=package; the engine tests, the builds and the tests of the preload library call these.
TOOLS="mmdebstrap=mmdebstrap xz=xz-utils zstd=zstd unshare=util-linux setpriv=util-linux nsenter=util-linux
ps=procps gcc=gcc readelf=binutils /usr/include/stdio.h=libc6-dev /lib/ld-musl-x86_64.so.1=musl /usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring
/etc/ssl/certs/ca-certificates.crt=ca-certificates"

find_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; found $(python3 --version 2>&1 || echo none). Install python3.11 (or newer) and its -venv package."
}

missing_packages() {
    for entry in $TOOLS; do
        tool=${entry%%=*}
        case $tool in
        /*) [ -e "$tool" ] || echo "${entry#*=}" ;;
        *) command -v "$tool" >/dev/null || echo "${entry#*=}" ;;
        esac
    done
    "$python" -c 'import ensurepip, venv' 2>/dev/null || venv_package
}

# Debian and Ubuntu ship venv's pip apart from each of their Pythons.
venv_package() {
    case $python in
    /usr/bin/python3) echo python3-venv ;;
    /usr/bin/python3.*) echo "${python##*/}-venv" ;;
    *) fail "$python has no venv or ensurepip module; use a complete Python 3.11 or newer" ;;
    esac
}

install_packages() {
    packages=$(missing_packages | sort -u | tr '\n' ' ')
    [ -n "$packages" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "not installed: $packages(needs root and apt-get; the tests in test hosts need them)"
        return 0
    fi
    say "installing $packages"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086 # a list of names
    apt-get install -qq -y --no-install-recommends $packages >/dev/null
}

make_venv() {
    if ! .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        say "making .venv with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv || fail "no virtual environment could be made; install the venv package of $python"
    fi
    say "installing requirements-dev.lock into .venv"
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --use-pep517 -r requirements-dev.lock
    touch .venv/ready
}

python=$(find_python)
install_packages
make_venv
