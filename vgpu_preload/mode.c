#define _GNU_SOURCE
#include "mode.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

bool mode_is_staged(void)
{
    char word[16] = "";
    int file = open(VGPU_MODE_PATH, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    ssize_t size = read(file, word, sizeof word - 1);
    close(file);
    if (size < 1) return false;
    word[strcspn(word, "\n")] = '\0';
    return strcmp(word, "staged") == 0;
}
