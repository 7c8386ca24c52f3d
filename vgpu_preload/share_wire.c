#define _GNU_SOURCE
#include "share_wire.h"

#include <string.h>
#include <unistd.h>

socklen_t share_address(const unsigned char name[SHARE_NAME_BYTES], struct sockaddr_un *address)
{
    static const char prefix[] = SHARE_THREAD_NAME "-", digits[] = "0123456789abcdef";
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    char *at = address->sun_path + 1; /* abstract: the first byte stays 0 */
    memcpy(at, prefix, sizeof prefix - 1);
    at += sizeof prefix - 1;
    for (int n = 0; n < SHARE_NAME_BYTES; n++) {
        *at++ = digits[name[n] >> 4];
        *at++ = digits[name[n] & 0xf];
    }
    return (socklen_t)(at - (char *)address);
}

bool share_peer_is_trusted(int socket, int *process)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
    *process = peer.pid;
    return peer.uid == 0 || peer.uid == geteuid();
}
