/* Time as deadlines need it: a clock that nobody sets, and sleeping that nobody's signal cuts short for long. */
#ifndef VGPU_CLOCK_H
#define VGPU_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t clock_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static inline void clock_sleep_us(long microseconds)
{
    struct timespec pause = {.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

#endif
