/* A group of GPU processes that share device memory and wait for each other on the device; each checks every word it gets.
 *
 *   ring --out FILE [--mode ring] [--ranks 4] [--devices 1] [--share fd] [--mib 1] [--interval 20] [--step-limit N] [--ahead 1]
 *
 * Modes: ring (sum over all ranks), graph (the same, each step one captured graph), guests (the same, and the last rank comes and
 * goes every --epoch steps), server (parameter server), pipeline (both directions, a host thread that waits for the GPU), outlive
 * (importers whose exporter ends). --share fd, handle or mixed says how memory is given to others. Rank n uses device n modulo
 * --devices. --interval is a mean in ms, drawn anew for each rank and step; every other rank launches --ahead steps at once.
 * --fork-server 1 forks the ranks from a process of their own. --beat MS: each rank also counts in a second stream and says so in FILE.beat.
 * --stall-rank, --stall-step: that rank does not come before FILE.go is there. --keep-going 1: a rank that ends does not end the others.
 * --hold 1: descriptors of shared memory stay open, and in the ring modes importers map them again and again. --send-late MS and
 * --take-late MS: so long between exporting and sending, and before receiving; FILE.late says who has come so far.
 *
 * The parent makes no CUDA. A rank appends "rank R step N sum S ok" to FILE; a wrong word says WRONG and ends with status 3, a
 * failed CUDA call with 2, a lost peer with 4. SIGTERM and SIGINT end all with 0. Runs on a real driver and on the software one.
 */
#define _GNU_SOURCE
#include <sys/prctl.h>
#include <sys/wait.h>

#include "group_outlive.h"
#include "group_pipeline.h"
#include "group_ring.h"
#include "group_server.h"

static volatile sig_atomic_t is_stopping;

static void stop(int signal)
{
    (void)signal;
    is_stopping = 1;
}

/* ---- beside the collectives ---- */

static void *beat(void *argument)
{
    const struct rank *rank = argument;
    char path[600], line[80];
    CUstream stream;
    CHECK(cuCtxSetCurrent(rank->context));
    word *host = allocate_host(8);
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr counter = allocate(8);
    snprintf(path, sizeof path, "%s.beat", rank->options->out);
    for (word beats = 1;; beats++) {
        launch(rank->increment, stream, counter, 1, 1);
        CHECK(cuMemcpyDtoHAsync_v2(host, counter, 8, stream));
        CHECK(cuStreamSynchronize(stream));
        compare_sum(rank, beats, *host, beats);
        snprintf(line, sizeof line, "rank %d beat %llu ok\n", rank->number, beats);
        append_to(path, line);
        pause_ms(rank->options->beat_ms);
    }
    return NULL;
}

/* ---- processes ---- */

static void run_rank(const struct options *options, int number)
{
    static const struct { const char *name; void (*run)(const struct options *, int); } modes[] = {
        {"ring", ring_mode}, {"graph", ring_mode}, {"guests", guests_mode}, {"server", server_mode}, {"pipeline", pipeline_mode}, {"outlive", outlive_mode},
    };
    for (size_t n = 0; n < sizeof modes / sizeof *modes; n++)
        if (!strcmp(modes[n].name, options->mode)) modes[n].run(options, number);
}

static void become_child(int number, pid_t parent)
{
    signal(SIGTERM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    snprintf(prefix, sizeof prefix, "rank %d: ", number);
}

static pid_t fork_rank(const struct options *options, int number, word epoch)
{
    pid_t parent = getpid(), child = fork();
    if (child < 0) fail(2, "fork: %s\n", strerror(errno));
    if (child > 0) return child;
    become_child(number, parent);
    mesh_close_others(number);
    if (epoch) guest(options, number, epoch);
    else run_rank(options, number);
    exit(0);
}

static void end_all(const pid_t *children)
{
    for (int n = 0; n < MOST_RANKS; n++)
        if (children[n] > 0) kill(children[n], SIGKILL);
}

static int worse(int worst, int status)
{
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return code > worst ? code : worst;
}

static int number_of(const pid_t *children, pid_t child)
{
    for (int n = 0; n < MOST_RANKS; n++)
        if (children[n] == child) return n;
    return -1;
}

/* The guest's next visit, 0: it has made all of them. */
static word next_visit(const struct options *options, word epoch)
{
    bool comes = !strcmp(options->mode, "guests") && (epoch + 2) * (word)options->epoch < (word)options->step_limit;
    return comes ? epoch + 2 : 0;
}

static int watch(const struct options *options, pid_t *children)
{
    int worst = 0, status;
    word visit = 1;
    for (;;) {
        pid_t child = wait(&status);
        if (is_stopping) {
            end_all(children);
            return 0;
        }
        if (child < 0 && errno == ECHILD) return worst;
        int number = number_of(children, child);
        if (number < 0) continue;
        worst = worse(worst, status);
        children[number] = 0;
        if (status != 0 && !options->keep_going) end_all(children);
        else if (number == options->ranks - 1 && (visit = next_visit(options, visit))) children[number] = fork_rank(options, number, visit);
    }
}

static int run_group(const struct options *options)
{
    pid_t children[MOST_RANKS] = {0};
    bool has_guest = !strcmp(options->mode, "guests");
    int last = (int)options->ranks - 1;
    mesh_make((int)options->ranks);
    for (int n = 0; n <= last; n++) children[n] = fork_rank(options, n, has_guest && n == last);
    for (int n = 0; n <= last; n++)
        if (!has_guest || n != last) mesh_close(n);
    return watch(options, children);
}

static int run_fork_server(const struct options *options)
{
    int status;
    pid_t parent = getpid(), server = fork();
    if (server < 0) fail(2, "fork: %s\n", strerror(errno));
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        exit(run_group(options));
    }
    while (waitpid(server, &status, 0) < 0)
        if (is_stopping) kill(server, SIGTERM);
    return worse(0, status);
}

/* ---- options ---- */

static long number(const char *text, const char *name)
{
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < 0) fail(1, "%s needs a number, not %s\n", name, text);
    return value;
}

static bool set_option(struct options *options, const char *name, const char *value)
{
    const struct { const char *name; long *number; const char **text; } known[] = {
        {"--out", NULL, &options->out}, {"--mode", NULL, &options->mode}, {"--share", NULL, &options->share},
        {"--ranks", &options->ranks, NULL}, {"--devices", &options->devices, NULL}, {"--mib", &options->mib, NULL},
        {"--interval", &options->interval_ms, NULL}, {"--step-limit", &options->step_limit, NULL}, {"--ahead", &options->ahead, NULL},
        {"--epoch", &options->epoch, NULL}, {"--check-all", &options->check_all, NULL}, {"--beat", &options->beat_ms, NULL},
        {"--stall-rank", &options->stall_rank, NULL}, {"--stall-step", &options->stall_step, NULL},
        {"--fork-server", &options->fork_server, NULL}, {"--keep-going", &options->keep_going, NULL}, {"--hold", &options->hold, NULL},
        {"--send-late", &options->send_late_ms, NULL}, {"--take-late", &options->take_late_ms, NULL},
    };
    for (size_t n = 0; n < sizeof known / sizeof *known; n++) {
        if (strcmp(known[n].name, name) != 0) continue;
        if (known[n].number) *known[n].number = number(value, name);
        else *known[n].text = value;
        return true;
    }
    return false;
}

static bool is_one_of(const char *word, const char *list)
{
    const char *found = strstr(list, word);
    return *word && found && (found == list || found[-1] == ' ') && (found[strlen(word)] == ' ' || !found[strlen(word)]);
}

static struct options parse(int argc, char **argv)
{
    struct options options = {.mode = "ring", .share = "fd", .ranks = 4, .devices = 1, .mib = 1, .interval_ms = 20, .step_limit = 1000000000,
                              .ahead = 1, .epoch = 10, .check_all = 4, .seed = 1};
    for (int n = 1; n < argc; n += 2)
        if (n + 1 >= argc || !set_option(&options, argv[n], argv[n + 1])) fail(1, "unknown option, or none after it: %s\n", argv[n]);
    bool is_whole = options.out && options.ranks >= 2 && options.ranks <= MOST_RANKS && options.devices >= 1 && options.mib >= 1;
    if (!is_whole || options.ahead < 1 || options.epoch < 1 || options.check_all < 1) fail(1, "--out FILE, 2 to %d ranks, and numbers of at least 1\n", MOST_RANKS);
    if (!is_one_of(options.mode, "ring graph guests server pipeline outlive")) fail(1, "no mode %s\n", options.mode);
    if (!is_one_of(options.share, "fd handle mixed")) fail(1, "--share %s\n", options.share);
    if (!strcmp(options.mode, "guests") && options.ranks < 3) fail(1, "two ranks stay when the guest is away\n");
    return options;
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = stop};
    struct options options = parse(argc, argv);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    load_driver();
    return options.fork_server ? run_fork_server(&options) : run_group(&options);
}
