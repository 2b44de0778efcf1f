// Signals of the host: its handlers and masks stay, and no signal reaches a thread of the library.
#include "boundary.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

enum { TOKENS = 60 };

static const int handled[] = {SIGSEGV, SIGPIPE, SIGUSR1, SIGCHLD, SIGPROF};
static _Thread_local volatile sig_atomic_t is_host_thread;
static atomic_uint signals, signals_to_library;

// Without SA_RESTART, so that system calls of the process are interrupted.
static void on_signal(int signal) {
    (void)signal;
    atomic_fetch_add(is_host_thread ? &signals : &signals_to_library, 1);
}

typedef struct {
    struct sigaction actions[65];
    sigset_t mask;
    stack_t alternate;
} signal_state;

static void read_signal_state(signal_state *state) {
    memset(state, 0, sizeof *state);
    for (int s = 1; s < 65; s++) sigaction(s, NULL, &state->actions[s]);
    pthread_sigmask(SIG_SETMASK, NULL, &state->mask);
    sigaltstack(NULL, &state->alternate);
}

static bool same_signals(const signal_state *a, const signal_state *b) {
    for (int s = 1; s < 65; s++)
        if (a->actions[s].sa_handler != b->actions[s].sa_handler ||
            a->actions[s].sa_flags != b->actions[s].sa_flags)
            return false;
    return !memcmp(&a->mask, &b->mask, sizeof a->mask) && a->alternate.ss_sp == b->alternate.ss_sp;
}

static void install_handlers(void) {
    struct sigaction action = {.sa_handler = on_signal};
    for (size_t i = 0; i < COUNT(handled); i++) sigaction(handled[i], &action, NULL);
    sigset_t some;
    sigemptyset(&some);
    sigaddset(&some, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &some, NULL);
    setitimer(ITIMER_PROF, &(struct itimerval){{0, 1000}, {0, 1000}}, NULL);
}

typedef struct {
    const pllm_engine *engine;
    atomic_bool stopped;
} signal_load;

// The host's own threads start with all signals blocked, until they have marked themselves as host
// threads.
static pthread_t start_host_thread(void *(*run)(void *), void *argument) {
    pthread_t thread = {0};
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    CHECK(pthread_create(&thread, NULL, run, argument) == 0);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return thread;
}

static void begin_host_thread(void) {
    sigset_t none;
    sigemptyset(&none);
    is_host_thread = true;
    pthread_sigmask(SIG_SETMASK, &none, NULL);
}

static void *send_signals(void *argument) {
    signal_load *s = argument;
    begin_host_thread();
    while (!atomic_load(&s->stopped)) {
        kill(getpid(), SIGUSR1);
        kill(getpid(), SIGCHLD);
        nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    return NULL;
}

static void *generate_under_signals(void *argument) {
    signal_load *s = argument;
    begin_host_thread();
    pllm_queue *queue = new_queue(s->engine, 4);
    struct pollfd entry = {.fd = event_fd(queue), .events = POLLIN};
    for (unsigned i = 0; i < PROMPTS; i++) {
        generation a;
        add_prompt(s->engine, queue, i, TOKENS, &a);
        while (!a.ends) {
            if (i % 2) poll(&entry, 1, 10);
            take_outputs(queue, i % 2 ? 0 : -1);
        }
        CHECK(is_complete(&a, i, TOKENS));
    }
    pllm_queue_free(queue);
    return NULL;
}

static void library_threads_receive_no_signals(void) {
    for (unsigned q = 0; q < PROMPTS; q++) reference(q, TOKENS);
    signal_state before, after;
    pthread_t sending, generating[4];
    signal_load s = {0};
    is_host_thread = true;
    install_handlers();
    read_signal_state(&before);
    sending = start_host_thread(send_signals, &s);
    enum { MAX_ROUNDS = 500 };
    for (int i = 0; i < 5 || (atomic_load(&signals) <= 300 && i < MAX_ROUNDS); i++) {
        pllm_engine_options options = options_for(model_dir);
        options.threads = 2;
        pllm_engine *engine = NULL;
        if (!OK(pllm_engine_create(&options, &engine))) break;
        s.engine = engine;
        OK(pllm_engine_start(engine));
        for (size_t i = 0; i < COUNT(generating); i++)
            generating[i] = start_host_thread(generate_under_signals, &s);
        for (size_t i = 0; i < COUNT(generating); i++) pthread_join(generating[i], NULL);
        pllm_engine_free(engine);
    }
    read_signal_state(&after);
    atomic_store(&s.stopped, true);
    pthread_join(sending, NULL);
    CHECK(same_signals(&before, &after));
    CHECK(atomic_load(&signals_to_library) == 0);
    if (!CHECK(atomic_load(&signals) > 300)) printf("    only %u signals arrived\n", signals);
}

const test signals_tests[] = {
    TEST(library_threads_receive_no_signals),
    {0},
};
