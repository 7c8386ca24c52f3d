/* One process each that does what real programs do around CUDA: argv[1] says which. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "waiting.h"

static void *cuda;

static int initialise(void)
{
    if (cuda == NULL) cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (cuda == NULL) return 96;
    int (*init)(unsigned int) = (int (*)(unsigned int))dlsym(cuda, "cuInit");
    return init(0);
}

static int open_sockets(void)
{
    int count = 0;
    for (int descriptor = 0; descriptor < 1024; descriptor++) {
        struct stat status;
        count += fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode);
    }
    return count;
}

static void *initialise_in_thread(void *unused)
{
    (void)unused;
    return (void *)(long)initialise();
}

static int two_hundred_threads(void)
{
    pthread_t threads[200];
    for (int n = 0; n < 200; n++)
        if (pthread_create(&threads[n], NULL, initialise_in_thread, NULL) != 0) return 10;
    for (int n = 0; n < 200; n++) {
        void *result;
        pthread_join(threads[n], &result);
        if (result != NULL) return 11;
    }
    say("ready\n");
    wait_for_end();
    return 0;
}

/* The parent is registered; the child must hold none of its sockets, and gets a helper of its own. */
static int forks(void)
{
    struct timespec moment = {.tv_nsec = 1000000};
    if (initialise() != 0) return 10;
    for (int n = 0; n < 3000 && open_sockets() == 0; n++) nanosleep(&moment, NULL);
    if (open_sockets() != 1) return 11;
    for (int n = 0; n < 100; n++) {
        pid_t short_lived = fork();
        int status;
        if (short_lived == 0) _exit(open_sockets());
        waitpid(short_lived, &status, 0);
        if (status != 0) return 12;
    }
    pid_t child = fork();
    if (child == 0) {
        if (open_sockets() != 0) _exit(13);
        if (initialise() != 0) _exit(14);
        say("ready\n");
        wait_for_end();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 15;
}

static int helper_descriptor(void)
{
    for (int descriptor = 1023; descriptor > 2; descriptor--) {
        struct stat status;
        if (fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode)) return descriptor;
    }
    return -1;
}

static int number_of_closed_helper_socket(void)
{
    struct timespec moment = {.tv_nsec = 1000000};
    char go;
    if (initialise() != 0) return -1;
    for (int n = 0; n < 3000 && helper_descriptor() < 200; n++) nanosleep(&moment, NULL);
    int theirs = helper_descriptor();
    say("ready\n");
    if (read(0, &go, 1) != 1) return -1;
    for (int descriptor = 3; descriptor < 1024; descriptor++) close(descriptor);
    return theirs;
}

/* Daemons close all they find, then open files of their own; one of them gets the helper's number. */
static int closes_all_opens_file(const char *path)
{
    int number = number_of_closed_helper_socket(), file = open(path, O_RDWR | O_CREAT, 0600);
    if (number < 200 || dup2(file, number) != number) return 13;
    say("closed\n");
    wait_for_end();
    struct stat size;
    if (fstat(number, &size) != 0 || !S_ISREG(size.st_mode)) return 14; /* somebody closed the application's file */
    return size.st_size == 0 ? 0 : 15;                                  /* or wrote into it */
}

/* The same with a socket, which send and recv of a careless helper would take for its own. */
static int closes_all_opens_socket(void)
{
    int number = number_of_closed_helper_socket(), pair[2];
    char got[16];
    if (number < 200 || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0 || dup2(pair[0], number) != number) return 13;
    if (write(pair[1], "theirs", 6) != 6) return 14;
    say("closed\n");
    wait_for_end();
    if (recv(number, got, sizeof got, MSG_DONTWAIT) != 6) return 15;
    return recv(pair[1], got, sizeof got, MSG_DONTWAIT) < 0 ? 0 : 16;
}

static void *ends_soon(void *unused)
{
    struct timespec moment = {.tv_nsec = 50000000};
    nanosleep(&moment, NULL);
    return unused;
}

static void said_at_exit(void)
{
    say("exit handlers ran\n");
}

/* libc runs exit() when the last thread ends; the helper must not be that thread for ever. */
static int main_thread_ends(void)
{
    pthread_t worker;
    atexit(said_at_exit);
    if (initialise() != 0) return 10;
    pthread_create(&worker, NULL, ends_soon, NULL);
    pthread_detach(worker);
    pthread_exit(NULL);
}

/* glibc sends a signal to every thread and waits for each to obey: a helper that blocked it would hang us here. */
static int changes_user(void)
{
    if (initialise() != 0) return 10;
    if (setuid(getuid()) != 0 || setgid(getgid()) != 0) return 11;
    say("ready\n");
    wait_for_end();
    return 0;
}

static void on_signal(int number)
{
    (void)number;
}

/* Signals of the process reach the application's own thread, mask and errno are as they were. */
static int keeps_signals(void)
{
    sigset_t before, after;
    sigemptyset(&before);
    sigaddset(&before, SIGUSR2);
    sigprocmask(SIG_SETMASK, &before, NULL);
    signal(SIGUSR1, on_signal);
    errno = 1234;
    if (initialise() != 0) return 10;
    if (errno != 1234) return 11;
    sigprocmask(SIG_SETMASK, NULL, &after);
    for (int number = 1; number < 32; number++)
        if (sigismember(&before, number) != sigismember(&after, number)) return 12;
    say("ready\n");
    while (pause() == 0) continue; /* ends with EINTR when this thread takes the signal */
    return 0;
}

static int unloads_driver(void)
{
    if (initialise() != 0) return 10;
    dlclose(cuda);
    say("ready\n");
    wait_for_end();
    return 0;
}

static int fails_to_initialise(void)
{
    say(initialise() == 0 ? "initialised\n" : "ready\n");
    wait_for_end();
    return open_sockets();
}

static int has_odd_name(void)
{
    prctl(PR_SET_NAME, "q\"b\\n\nx\xff\xc3\xa9");
    if (initialise() != 0) return 10;
    say("ready\n");
    wait_for_end();
    return 0;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "plain") == 0) return initialise() != 0 || (say("ready\n"), wait_for_end(), 0);
    if (strcmp(what, "exit") == 0) return initialise();
    if (strcmp(what, "quick_exit") == 0) _exit(initialise());
    if (strcmp(what, "threads") == 0) return two_hundred_threads();
    if (strcmp(what, "forks") == 0) return forks();
    if (strcmp(what, "closes_file") == 0) return closes_all_opens_file(argv[2]);
    if (strcmp(what, "closes_socket") == 0) return closes_all_opens_socket();
    if (strcmp(what, "main_ends") == 0) return main_thread_ends();
    if (strcmp(what, "changes_user") == 0) return changes_user();
    if (strcmp(what, "signals") == 0) return keeps_signals();
    if (strcmp(what, "unloads") == 0) return unloads_driver();
    if (strcmp(what, "fails") == 0) return fails_to_initialise();
    if (strcmp(what, "odd_name") == 0) return has_odd_name();
    return 95;
}
