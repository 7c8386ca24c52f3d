/* Refers to the driver weakly and runs where there is none. */
#include <stdio.h>

extern int cuInit(unsigned int flags) __attribute__((weak));

int main(void)
{
    printf("%d\n", cuInit == NULL ? -1 : cuInit(0));
    return 0;
}
