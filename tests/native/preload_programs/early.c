#include "waiting.h"

extern int early_result;

int main(void)
{
    if (early_result != 0) return 3;
    say("ready\n");
    wait_for_end();
    return 0;
}
