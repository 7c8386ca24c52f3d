/* Linked against libcuda.so.1, as a driver-API program is. Any argument: initialises once more. */
#include "waiting.h"

extern int cuInit(unsigned int flags);
extern int stub_init_calls(void);

int main(int argc, char **argv)
{
    if (cuInit(0) != 0) return 3;
    if (stub_init_calls() != 1) return 4;
    if (argc > 1 && cuInit(0) != 0) return (int)strlen(argv[1]);
    say("ready\n");
    wait_for_end();
    return 0;
}
