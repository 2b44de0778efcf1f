// Floating-point mode, locale, environment and standard streams of the process.
#include "boundary.h"

#include <fcntl.h>
#include <fenv.h>
#include <locale.h>
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum { TOKENS = 60 };

static void floating_point_mode_has_no_effect_and_is_preserved(void) {
    reference(1, TOKENS);
    generation a, b;
    fesetround(FE_UPWARD);
    feclearexcept(FE_ALL_EXCEPT);
    feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);  // flush subnormal inputs and outputs to zero
    unsigned before = _mm_getcsr();
#endif
    pllm_engine *engine = open_engine(model_dir);
    add_prompt(engine, NULL, 1, TOKENS, &a);
    step_to_the_end(engine);
    OK(pllm_engine_start(engine));  // a thread inherits the mode of the thread that creates it
    add_prompt(engine, NULL, 1, TOKENS, &b);
    while (!b.ends) take_outputs(pllm_engine_queue(engine), -1);
    pllm_engine_free(engine);
    CHECK(is_complete(&a, 1, TOKENS) && is_complete(&b, 1, TOKENS));
    CHECK(fegetround() == FE_UPWARD && fegetexcept() == (FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW));
    CHECK(!fetestexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW));
#if defined(__x86_64__)
    CHECK((_mm_getcsr() & 0xFFC0) == (before & 0xFFC0));
#endif
}

static void locale_with_decimal_commas_has_no_effect(void) {
    static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8",  "fr_FR.UTF-8", "fr_FR.utf8",
                                        "es_ES.UTF-8", "pt_BR.UTF-8", "de_DE"};
    const char *set = NULL;
    reference(4, TOKENS);
    for (size_t i = 0; i < COUNT(names) && !set; i++) set = setlocale(LC_ALL, names[i]);
    if (!set || localeconv()->decimal_point[0] != ',')
        skip("no locale with decimal commas is installed (apt-get install locales-all)");
    char before[64];
    snprintf(before, sizeof before, "%s", set);
    pllm_engine *engine = open_engine(model_dir);
    generation a;
    add_prompt(engine, NULL, 4, TOKENS, &a);
    step_to_the_end(engine);
    pllm_engine_free(engine);
    CHECK(is_complete(&a, 4, TOKENS));
    CHECK(!strcmp(setlocale(LC_ALL, NULL), before));
}

extern char **environ;

static uint64_t hash_of_environment(void) {
    uint64_t hash = 14695981039346656037u;
    for (char **entry = environ; *entry; entry++)
        for (const char *c = *entry;; c++) {
            hash = (hash ^ (unsigned char)*c) * 1099511628211u;
            if (!*c) break;
        }
    return hash;
}

static mode_t file_mode_mask(void) {
    mode_t mask = umask(0);
    umask(mask);
    return mask;
}

typedef struct {
    char directory[4096], thread[16];
    uint64_t environment;
    mode_t mask;
    int flags[3];
    off_t written;
} process_state;

static void read_process_state(process_state *s) {
    memset(s, 0, sizeof *s);
    CHECK(getcwd(s->directory, sizeof s->directory) != NULL);
    pthread_getname_np(pthread_self(), s->thread, sizeof s->thread);
    s->environment = hash_of_environment();
    s->mask = file_mode_mask();
    for (int fd = 0; fd < 3; fd++) s->flags[fd] = fcntl(fd, F_GETFL);
    fflush(NULL);
    s->written = lseek(1, 0, SEEK_CUR);
}

static void process_state_is_unchanged(void) {
    process_state before, after;
    reference(0, TOKENS);
    umask(027);
    read_process_state(&before);
    CHECK(before.written >= 0);  // output goes to a file, so that every written byte is detected
    pllm_engine *engine = open_engine(model_dir);
    generation a, b;
    OK(pllm_engine_start(engine));
    add_prompt(engine, NULL, 0, TOKENS, &a);
    add_prompt(engine, NULL, 1, 500, &b);
    while (!a.ends) take_outputs(pllm_engine_queue(engine), -1);
    pllm_engine_free(engine);
    read_process_state(&after);
    CHECK(is_complete(&a, 0, TOKENS));
    CHECK(!memcmp(&before, &after, sizeof before));
}

// A daemon: descriptors 0 to 2 are closed, so the library's files and events get these numbers.
static void library_works_without_standard_streams(void) {
    reference(0, TOKENS);
    int out = fcntl(1, F_DUPFD, 100), err = fcntl(2, F_DUPFD, 100);
    fflush(stdout);
    for (int fd = 0; fd < 3; fd++) close(fd);
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 4);
    generation a;
    int fd = event_fd(queue);
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    OK(pllm_engine_start(engine));
    add_prompt(engine, queue, 0, TOKENS, &a);
    while (!a.ends && CHECK(poll(&entry, 1, 10000) == 1)) take_outputs(queue, 0);
    pllm_queue_free(queue);
    pllm_engine_free(engine);
    CHECK(fcntl(0, F_GETFD) < 0 && fcntl(1, F_GETFD) < 0 && fcntl(2, F_GETFD) < 0);
    dup2(out, 1);
    dup2(err, 2);
    CHECK(fd == 0 && is_complete(&a, 0, TOKENS));
}

const test process_state_tests[] = {
    TEST(floating_point_mode_has_no_effect_and_is_preserved),
    TEST(locale_with_decimal_commas_has_no_effect),
    TEST(process_state_is_unchanged),
    TEST(library_works_without_standard_streams),
    {0},
};
