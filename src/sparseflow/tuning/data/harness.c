/* Measures one kernel, and a reference beside it, in a process that holds nothing else.
 *
 *   harness REPORT OUTPUT REPEATS MIN_NS MAX_NS PAIRS MEMORY PARENT SLOWER  KERNEL [KERNEL]
 *   KERNEL = LIBRARY OUTPUT_BYTES INPUTS {FILE BYTES}*INPUTS
 *
 * REPORT, OUTPUT and each FILE are numbers of file descriptors that were inherited. The candidate stands first,
 * the reference, if any, second. A candidate whose first run takes more than SLOWER times as long as the reference's
 * (0: however long) is given up. REPORT is mapped and written as things happen, so that whoever finds this process
 * dead reads in it how far it came; `runner.py` knows the same layout. Every kernel has arrays of its own: inputs
 * that cannot be written, an output that begins as NaN, and behind the end of each a page that cannot be touched.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <omp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define ALIGNMENT 64u
#define HUGE ((uintptr_t)2 << 20)
/* How long a sample shall last: far above the clock's resolution and a thread's waking up. */
#define SAMPLE_NS 1000000
#define MOST_CALLS 1000000
/* A first run pays for cold caches, for starting threads and for whoever was on the CPU before; beyond this many
 * samples that no longer matters. */
#define LONG_RUN 50
/* Added to what a candidate's first run may take: what the system may need for other things meanwhile. */
#define GRACE_NS 20000000

enum { CANDIDATE, REFERENCE, SIDES };
/* A stage and whom it is about: 2 * stage + side. */
enum { STARTING, LOADING, FIRST_RUN, TIMING, DONE };

typedef struct {
    int64_t step;        /* where it stands: 2 * stage + side */
    int64_t pairs;       /* samples taken of each side */
    int64_t calls[SIDES]; /* calls in a sample */
    int64_t wall_ns;     /* from before the first sample to after the last */
    int64_t cpu_ns;      /* CPU time of this process meanwhile */
    int64_t waited_ns;   /* what its threads spent ready to run and without a CPU; -1 where the kernel is silent */
    int64_t threads;     /* threads alive at the end */
    int64_t cpus;        /* CPUs that OpenMP may use */
    char message[512];   /* what went wrong; empty where nothing did */
    int64_t samples[][SIDES]; /* nanoseconds of `calls` calls */
} Report;

typedef struct {
    const char *library;
    void (*run)(const void *const *inputs, void *const *outputs);
    const void **inputs;
    void *output;
    size_t output_bytes;
} Kernel;

static Report *report;

static void at(int stage, int side) { *(volatile int64_t *)&report->step = 2 * stage + side; }

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(report->message, sizeof report->message, format, values);
    va_end(values);
    _exit(1);
}

static void too_slow(int signal) {
    static const char text[] = "it takes too many times as long as the reference, and was given up";
    (void)signal;
    memcpy(report->message, text, sizeof text);
    _exit(1);
}

/* Gives up what still runs after so many nanoseconds; 0 takes that back. */
static void alarm_in(int64_t ns) {
    struct itimerval timer = {.it_value = {ns / 1000000000, ns % 1000000000 / 1000}};
    signal(SIGALRM, too_slow);
    setitimer(ITIMER_REAL, &timer, NULL);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t cpu_now(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return ((int64_t)use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1000000000 +
           ((int64_t)use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1000;
}

/* What all threads together waited for a CPU since they began, and how many there are. */
static int64_t waited_now(int64_t *threads) {
    DIR *tasks = opendir("/proc/self/task");
    int64_t sum = tasks ? 0 : -1;
    *threads = 0;
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        char path[300];
        long long ran, waited;
        if (task->d_name[0] == '.')
            continue;
        ++*threads;
        snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", task->d_name);
        FILE *file = fopen(path, "r");
        if (!file || fscanf(file, "%lld %lld", &ran, &waited) != 2)
            sum = -1;
        else if (sum >= 0)
            sum += waited;
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return sum;
}

/* The pages that an array of so many bytes shall lie in: large ones where it fills one. */
static uintptr_t page_of(size_t bytes) { return bytes >= HUGE ? HUGE : (uintptr_t)sysconf(_SC_PAGESIZE); }

/* Memory that ends, up to the alignment, where a page begins that cannot be touched. */
static void *guarded(size_t bytes, const char *what, const char *library) {
    uintptr_t page = page_of(bytes), guard = (uintptr_t)sysconf(_SC_PAGESIZE);
    size_t room = (bytes + page - 1) / page * page;
    char *map = mmap(NULL, room + page + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        fail("out of memory: %zu bytes for %s of %s cannot be had", bytes, what, library);
    char *start = (char *)(((uintptr_t)map + page - 1) / page * page);
    /* As the arrays of numpy and torch have them, and without which a time depends on which small pages were free;
     * an error only says that there are none. */
    madvise(start, room, MADV_HUGEPAGE);
    mprotect(start + room, guard, PROT_NONE);
    return start + room - (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Makes an array that `guarded` gave read only. Whole pages, since a large one that is cut is large no more. */
static void protect(char *array, size_t bytes) {
    uintptr_t page = page_of(bytes), start = (uintptr_t)array / page * page;
    if (bytes)
        mprotect((void *)start, (uintptr_t)array + bytes - start, PROT_READ);
}

static void fill(char *array, size_t bytes, int file, const char *library) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(file, array + done, bytes - done, (off_t)done);
        if (got <= 0 && !(got < 0 && errno == EINTR))
            fail("an input of %s cannot be read: %s", library, got ? strerror(errno) : "it is too short");
        done += got > 0 ? (size_t)got : 0;
    }
}

static size_t number(const char *text) { return strtoull(text, NULL, 10); }

/* Loads what the arguments from `*next` on describe, and moves it behind them. */
static Kernel load(char ***next) {
    Kernel kernel = {.library = *(*next)++};
    kernel.output_bytes = number(*(*next)++);
    size_t count = number(*(*next)++);
    void *library = dlopen(kernel.library, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail("it cannot be loaded: %s", dlerror());
    *(void **)&kernel.run = dlsym(library, "sparseflow_kernel");
    if (!kernel.run)
        fail("`sparseflow_kernel` is missing from %s", kernel.library);
    kernel.inputs = calloc(count + 1, sizeof *kernel.inputs);
    if (!kernel.inputs)
        fail("out of memory: %zu pointers cannot be had", count);
    for (size_t i = 0; i < count; i++) {
        int file = (int)number(*(*next)++);
        size_t bytes = number(*(*next)++);
        char *array = guarded(bytes, "an input", kernel.library);
        fill(array, bytes, file, kernel.library);
        protect(array, bytes);
        kernel.inputs[i] = array;
    }
    kernel.output = guarded(kernel.output_bytes, "the output", kernel.library);
    memset(kernel.output, 0xFF, kernel.output_bytes);
    return kernel;
}

static void save(const Kernel *kernel, int file) {
    for (size_t done = 0; done < kernel->output_bytes;) {
        ssize_t put =
            pwrite(file, (char *)kernel->output + done, kernel->output_bytes - done, (off_t)done);
        if (put <= 0 && !(put < 0 && errno == EINTR))
            fail("the output cannot be handed back: %s", strerror(errno));
        done += put > 0 ? (size_t)put : 0;
    }
}

/* Nanoseconds of `calls` calls, at least one, so that a ratio never divides by nothing. */
static int64_t sample(const Kernel *kernel, int64_t calls) {
    void *outputs[] = {kernel->output};
    int64_t start = now();
    for (int64_t i = 0; i < calls; i++)
        kernel->run(kernel->inputs, outputs);
    int64_t took = now() - start;
    return took > 0 ? took : 1;
}

/* How many calls last as long as a sample shall. */
static int64_t calls_for(const Kernel *kernel, int64_t first_ns) {
    if (first_ns >= LONG_RUN * SAMPLE_NS)
        return 1;
    for (int64_t calls = 1;;) {
        /* A run that was interrupted, or that had threads to wake up, looks long, and too few calls would be
         * taken: the shortest of some tells. */
        int64_t took = calls == 1 ? first_ns : sample(kernel, calls), sum = took;
        for (int more = 0; more < 1 || (more < 8 && sum < LONG_RUN / 10 * SAMPLE_NS); more++) {
            int64_t again = sample(kernel, calls);
            took = again < took ? again : took;
            sum += again;
        }
        int64_t wanted = (int64_t)((double)calls * SAMPLE_NS / (double)took) + 1;
        if (wanted > MOST_CALLS)
            wanted = MOST_CALLS;
        if (8 * took >= SAMPLE_NS || calls == MOST_CALLS)
            return wanted;
        /* A short run tells its own length badly: go there in steps. */
        calls = wanted < 16 * calls ? wanted : 16 * calls;
    }
}

int main(int count, char **arguments) {
    if (count < 13)
        return 2;
    /* Whoever asked is gone: nobody would stop a kernel that hangs. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if ((size_t)getppid() != number(arguments[8]))
        return 3;
    size_t capacity = number(arguments[6]), memory = number(arguments[7]);
    report = mmap(NULL, sizeof *report + capacity * sizeof report->samples[0], PROT_READ | PROT_WRITE, MAP_SHARED,
                  (int)number(arguments[1]), 0);
    if (report == MAP_FAILED)
        return 4;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (memory)
        setrlimit(RLIMIT_AS, &(struct rlimit){memory, memory});
    /* Should the machine run out of memory, then this process shall go and not the one that waits for it. */
    int score = open("/proc/self/oom_score_adj", O_WRONLY);
    if (score >= 0) {
        if (write(score, "1000", 4) < 0)
            errno = 0;
        close(score);
    }
    report->cpus = omp_get_num_procs();

    int output = (int)number(arguments[2]);
    int64_t repeats = (int64_t)number(arguments[3]), least_ns = (int64_t)number(arguments[4]),
            most_ns = (int64_t)number(arguments[5]), first_ns[SIDES];
    Kernel kernels[SIDES];
    double slower = strtod(arguments[9], NULL);
    char **next = arguments + 10;
    int sides = 0;
    for (; *next && sides < SIDES; sides++) {
        at(LOADING, sides);
        kernels[sides] = load(&next);
    }
    for (int side = sides - 1; side >= 0; side--) {
        at(FIRST_RUN, side);
        int limited = side == CANDIDATE && sides > 1 && slower > 0;
        if (limited)
            alarm_in((int64_t)(slower * (double)first_ns[REFERENCE]) + GRACE_NS);
        first_ns[side] = sample(&kernels[side], 1);
        if (limited)
            alarm_in(0);
        if (side == CANDIDATE)
            save(&kernels[side], output);
    }
    for (int side = 0; side < sides; side++) {
        at(TIMING, side);
        report->calls[side] = calls_for(&kernels[side], first_ns[side]);
    }

    int64_t threads, waited = waited_now(&threads), cpu = cpu_now(), start = now(), passed = 0;
    for (int64_t pair = 0, enough = 0; pair < (int64_t)capacity && !enough; pair++) {
        for (int side = sides - 1; side >= 0; side--) {
            /* A first run that took all the time there is has told what a second would. */
            int told = first_ns[side] >= most_ns;
            at(TIMING, side);
            report->samples[pair][side] = told ? first_ns[side] : sample(&kernels[side], report->calls[side]);
            enough |= told;
        }
        report->pairs = pair + 1;
        passed = now() - start;
        enough |= passed >= most_ns || (pair + 1 >= repeats && passed >= least_ns);
    }
    report->wall_ns = passed;
    report->cpu_ns = cpu_now() - cpu;
    int64_t since = waited_now(&report->threads);
    report->waited_ns = since < 0 || waited < 0 ? -1 : since > waited ? since - waited : 0;
    at(DONE, 0);
    /* Nothing that a kernel's library does at its end belongs to the measurement. */
    _exit(0);
}
