// A host with signals, small stacks and a mood of its own: the library neither changes them nor minds them.
#include "boundary.h"

#include <fcntl.h>
#include <fenv.h>
#include <locale.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum { TOKENS = 60 };

// ---- signals -----------------------------------------------------------------------------------------------------------

static const int handled[] = {SIGSEGV, SIGPIPE, SIGUSR1, SIGCHLD, SIGPROF};
static _Thread_local volatile sig_atomic_t is_host_thread;
static atomic_uint signals, strayed;

// Without SA_RESTART, so that every system call of the process is interrupted at some time.
static void on_signal(int signal) {
    (void)signal;
    atomic_fetch_add(is_host_thread ? &signals : &strayed, 1);
}

typedef struct {
    struct sigaction actions[65];
    sigset_t mask;
    stack_t alternate;
} signal_state;

static void look_at_signals(signal_state *state) {
    memset(state, 0, sizeof *state);
    for (int s = 1; s < 65; s++) sigaction(s, NULL, &state->actions[s]);
    pthread_sigmask(SIG_SETMASK, NULL, &state->mask);
    sigaltstack(NULL, &state->alternate);
}

static bool same_signals(const signal_state *a, const signal_state *b) {
    for (int s = 1; s < 65; s++)
        if (a->actions[s].sa_handler != b->actions[s].sa_handler || a->actions[s].sa_flags != b->actions[s].sa_flags) return false;
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
    atomic_bool over;
} storm;

// The host's own threads are born deaf, so that no signal finds one before it says whose it is.
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
    storm *s = argument;
    begin_host_thread();
    while (!atomic_load(&s->over)) {
        kill(getpid(), SIGUSR1);
        kill(getpid(), SIGCHLD);
        nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    return NULL;
}

static void *ask_under_signals(void *argument) {
    storm *s = argument;
    begin_host_thread();
    pllm_queue *queue = new_queue(s->engine, 4);
    struct pollfd entry = {.fd = event_fd(queue), .events = POLLIN};
    for (unsigned i = 0; i < 3 * QUESTIONS; i++) {
        answer a;
        ask(s->engine, queue, i, TOKENS, &a);
        while (!a.ends) {
            if (i % 2) poll(&entry, 1, 10);
            take(queue, i % 2 ? 0 : -1);
        }
        CHECK(is_whole(&a, i, TOKENS));
    }
    pllm_queue_free(queue);
    return NULL;
}

static void a_host_keeps_its_signals_to_itself(void) {
    for (unsigned q = 0; q < QUESTIONS; q++) undisturbed(q, TOKENS);
    signal_state before, after;
    pthread_t sending, asking[4];
    storm s = {0};
    is_host_thread = true;
    install_handlers();
    look_at_signals(&before);
    sending = start_host_thread(send_signals, &s);
    double until = now() + 10;
    for (int round = 0; round < 5 || (atomic_load(&signals) <= 300 && now() < until); round++) {
        pllm_engine_options options = options_for(model_dir);
        options.threads = 2;
        pllm_engine *engine = NULL;
        if (!OK(pllm_engine_create(&options, &engine))) break;
        s.engine = engine;
        OK(pllm_engine_start(engine));
        for (size_t i = 0; i < COUNT(asking); i++) asking[i] = start_host_thread(ask_under_signals, &s);
        for (size_t i = 0; i < COUNT(asking); i++) pthread_join(asking[i], NULL);
        pllm_engine_free(engine);
    }
    look_at_signals(&after);
    atomic_store(&s.over, true);
    pthread_join(sending, NULL);
    CHECK(same_signals(&before, &after));
    CHECK(atomic_load(&strayed) == 0);
    if (!CHECK(atomic_load(&signals) > 300)) printf("    only %u signals came\n", signals);
}

// ---- small stacks ------------------------------------------------------------------------------------------------------

// A conversation nested as deeply as the library reads.
static const char *deep_chat(void) {
    static char json[1024];
    size_t n = (size_t)snprintf(json, sizeof json, "[{\"role\": \"user\", \"content\": \"x\", \"deep\": ");
    for (int i = 0; i < 120; i++) json[n++] = '[';
    for (int i = 0; i < 120; i++) json[n++] = ']';
    strcpy(json + n, "}]");
    return json;
}

// Text to tokens and back, in ways that take the tokenizer and the template as deep as they go.
static void use_text(const pllm_engine *engine) {
    static const char chat[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"add_generation_prompt\": true}";
    static char text[20000];
    memset(text, 'a', sizeof text - 1);
    pllm_tokens *tokens = NULL;
    pllm_bytes *bytes = NULL;
    OK(pllm_engine_render_chat(engine, chat, PLLM_NUL_TERMINATED, &bytes));
    pllm_bytes_free(bytes);
    int32_t code = code_of(pllm_engine_render_chat(engine, deep_chat(), PLLM_NUL_TERMINATED, &bytes));
    CHECK(code == 0 || code == PLLM_E_INVALID_ARGUMENT);
    if (code == 0) pllm_bytes_free(bytes);
    OK(pllm_engine_tokenize(engine, text, PLLM_NUL_TERMINATED, PLLM_TEXT_ADD_SPECIAL, &tokens));
    OK(pllm_engine_detokenize(engine, pllm_tokens_data(tokens), pllm_tokens_len(tokens), 0, &bytes));
    CHECK(pllm_bytes_len(bytes) >= sizeof text - 1);
    pllm_bytes_free(bytes);
    pllm_tokens_free(tokens);
}

// Requests with each kind of grammar, beams, and stop strings.
static void use_sampling(pllm_engine *engine) {
    static const char *const stops[] = {"zzz", "yyy"};
    static const struct {
        uint32_t kind;
        const char *text;
    } grammars[] = {
        {PLLM_GRAMMAR_JSON_SCHEMA, "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\", \"pattern\": \"^[a-z]+$\"}}}"},
        {PLLM_GRAMMAR_REGEX, "(ab|cd){1,8}"},
        {PLLM_GRAMMAR_LARK, "start: /[a-z]+/ (\",\" start)?"},
    };
    for (size_t i = 0; i < COUNT(grammars) + 2; i++) {
        pllm_sampling sampling;
        pllm_sampling_init(&sampling, sizeof sampling);
        pllm_beam beam;
        pllm_beam_init(&beam, sizeof beam);
        pllm_request request;
        pllm_request_init(&request, sizeof request);
        request.prompt = "Hello";
        request.sampling = &sampling;
        sampling.max_tokens = 8;
        if (i < COUNT(grammars)) sampling.grammar_kind = grammars[i].kind, sampling.grammar = grammars[i].text;
        if (i == COUNT(grammars)) sampling.stop = stops, sampling.stop_count = COUNT(stops);
        if (i == COUNT(grammars) + 1) beam.width = 2, request.beam = &beam, sampling.temperature = 0;
        pllm_admission admission = {.struct_size = sizeof admission};
        OK(pllm_engine_predict_admission(engine, &request, &admission));
        uint64_t id;
        OK(pllm_engine_add_request(engine, &request, &id));
    }
    step_to_the_end(engine);
}

// A sequence's whole life: kept, forked, rewound, appended to, moved and resumed.
static void use_sequences(pllm_engine *engine) {
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.max_tokens = 8;
    request.prompt = "Hello";
    request.sampling = &sampling;
    request.flags |= PLLM_REQUEST_KEEP;
    uint64_t id, other;
    OK(pllm_engine_add_request(engine, &request, &id));
    step_to_the_end(engine);
    pllm_fork fork;
    pllm_fork_init(&fork, sizeof fork);
    OK(pllm_sequence_fork(engine, id, &fork, &other));
    const uint32_t tokens[] = {5, 6, 7};
    OK(pllm_sequence_append(engine, id, tokens, COUNT(tokens)));
    OK(pllm_sequence_rewind(engine, id, 2));
    pllm_sequence_info info = {.struct_size = sizeof info};
    OK(pllm_sequence_get_info(engine, id, &info));
    OK(pllm_sequence_export(engine, id, NULL));
    step_to_the_end(engine);
    pllm_pin pin;
    pllm_pin_init(&pin, sizeof pin);
    pin.prompt = "Hello, hello, hello";
    OK(pllm_prefix_pin(engine, &pin, &other));
    step_to_the_end(engine);
    OK(pllm_prefix_unpin(engine, other));
    pllm_resume resume;
    pllm_resume_init(&resume, sizeof resume);
    resume.sampling = &sampling;
    OK(pllm_sequence_resume(engine, id, &resume));
    step_to_the_end(engine);
    pllm_bytes *metrics = NULL;
    OK(pllm_engine_get_metrics(engine, &metrics));
    pllm_bytes_free(metrics);
    stats_of(engine);
}

static void *do_everything(void *unused) {
    (void)unused;
    pllm_engine_options options = options_for(model_dir);
    pllm_plan plan = {.struct_size = sizeof plan};
    OK(pllm_engine_plan(&options, &plan));
    pllm_engine *engine = open_engine(model_dir);
    answer *answers = calloc(64, sizeof *answers);
    use_text(engine);
    use_sampling(engine);
    use_sequences(engine);
    for (unsigned i = 0; i < 64; i++) ask(engine, NULL, i, 30, &answers[i]);
    step_to_the_end(engine);
    for (unsigned i = 0; i < 64; i++) CHECK(answers[i].ends == 1 && answers[i].tokens_len == 30);
    pllm_engine_free(engine);
    free(answers);
    return NULL;
}

static bool works_with_stack(size_t kib) {
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        bool small = pthread_attr_setstacksize(&attributes, kib << 10) == 0 && pthread_create(&thread, &attributes, do_everything, NULL) == 0;
        if (!small) _exit(2);
        pthread_join(thread, NULL);
        fflush(stdout);
        _exit(exit_code());
    }
    waitpid(child, &status, 0);
    return status == 0;
}

// The least that some hosts give their threads.
static void a_thread_with_a_small_stack_may_call_everything(void) {
    enum { PROMISED_KIB = 64 };
    size_t least = 0;
    for (size_t kib = 512; kib >= 32 && works_with_stack(kib); kib /= 2) least = kib;
    printf("    the smallest stack that does: %zu KiB\n", least);
    CHECK(SANITIZED || (least && least <= PROMISED_KIB));
}

// ---- floating point ----------------------------------------------------------------------------------------------------

static void the_floating_point_mode_neither_matters_nor_changes(void) {
    undisturbed(1, TOKENS);
    answer a, b;
    fesetround(FE_UPWARD);
    feclearexcept(FE_ALL_EXCEPT);
    feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);  // flush subnormals, on both sides
    unsigned before = _mm_getcsr();
#endif
    pllm_engine *engine = open_engine(model_dir);
    ask(engine, NULL, 1, TOKENS, &a);
    step_to_the_end(engine);
    OK(pllm_engine_start(engine));  // a thread inherits the mode of its maker
    ask(engine, NULL, 1, TOKENS, &b);
    while (!b.ends) take(pllm_engine_queue(engine), -1);
    pllm_engine_free(engine);
    CHECK(is_whole(&a, 1, TOKENS) && is_whole(&b, 1, TOKENS));
    CHECK(fegetround() == FE_UPWARD && fegetexcept() == (FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW));
    CHECK(!fetestexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW));
#if defined(__x86_64__)
    CHECK((_mm_getcsr() & 0xFFC0) == (before & 0xFFC0));
#endif
}

// ---- the rest of the process -------------------------------------------------------------------------------------------

static void a_locale_with_decimal_commas_changes_nothing(void) {
    static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "fr_FR.utf8", "es_ES.UTF-8", "pt_BR.UTF-8", "de_DE"};
    const char *set = NULL;
    undisturbed(4, TOKENS);
    for (size_t i = 0; i < COUNT(names) && !set; i++) set = setlocale(LC_ALL, names[i]);
    if (!set || localeconv()->decimal_point[0] != ',') skip("no locale with decimal commas is installed (apt-get install locales-all)");
    char before[64];
    snprintf(before, sizeof before, "%s", set);
    pllm_engine *engine = open_engine(model_dir);
    answer a;
    ask(engine, NULL, 4, TOKENS, &a);
    step_to_the_end(engine);
    pllm_engine_free(engine);
    CHECK(is_whole(&a, 4, TOKENS));
    CHECK(!strcmp(setlocale(LC_ALL, NULL), before));
}

extern char **environ;

static uint64_t hash_of_environment(void) {
    uint64_t hash = 14695981039346656037u;
    for (char **entry = environ; *entry; entry++)
        for (const char *c = *entry; ; c++) {
            hash = (hash ^ (unsigned char)*c) * 1099511628211u;
            if (!*c) break;
        }
    return hash;
}

static mode_t mask_of_files(void) {
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
} surroundings;

static void look_around(surroundings *s) {
    memset(s, 0, sizeof *s);
    CHECK(getcwd(s->directory, sizeof s->directory) != NULL);
    pthread_getname_np(pthread_self(), s->thread, sizeof s->thread);
    s->environment = hash_of_environment();
    s->mask = mask_of_files();
    for (int fd = 0; fd < 3; fd++) s->flags[fd] = fcntl(fd, F_GETFL);
    fflush(NULL);
    s->written = lseek(1, 0, SEEK_CUR);
}

static void the_surroundings_stay_as_they_are(void) {
    surroundings before, after;
    undisturbed(0, TOKENS);
    umask(027);
    look_around(&before);
    CHECK(before.written >= 0);  // output goes to a file: one byte more would be seen
    pllm_engine *engine = open_engine(model_dir);
    answer a, b;
    OK(pllm_engine_start(engine));
    ask(engine, NULL, 0, TOKENS, &a);
    ask(engine, NULL, 1, 500, &b);
    while (!a.ends) take(pllm_engine_queue(engine), -1);
    pllm_engine_free(engine);
    look_around(&after);
    CHECK(is_whole(&a, 0, TOKENS));
    CHECK(!memcmp(&before, &after, sizeof before));
}

// A daemon: descriptors 0 to 2 are free, and the library's own files and events get these numbers.
static void a_host_without_standard_streams_is_served(void) {
    undisturbed(0, TOKENS);
    int out = fcntl(1, F_DUPFD, 100), err = fcntl(2, F_DUPFD, 100);
    fflush(stdout);
    for (int fd = 0; fd < 3; fd++) close(fd);
    pllm_engine *engine = open_engine(model_dir);
    pllm_queue *queue = new_queue(engine, 4);
    answer a;
    int fd = event_fd(queue);
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    OK(pllm_engine_start(engine));
    ask(engine, queue, 0, TOKENS, &a);
    while (!a.ends && CHECK(poll(&entry, 1, 10000) == 1)) take(queue, 0);
    pllm_queue_free(queue);
    pllm_engine_free(engine);
    CHECK(fcntl(0, F_GETFD) < 0 && fcntl(1, F_GETFD) < 0 && fcntl(2, F_GETFD) < 0);
    dup2(out, 1);
    dup2(err, 2);
    CHECK(fd == 0 && is_whole(&a, 0, TOKENS));
}

const test_case host_cases[] = {
    CASE(a_host_keeps_its_signals_to_itself),
    CASE(a_thread_with_a_small_stack_may_call_everything),
    CASE(the_floating_point_mode_neither_matters_nor_changes),
    CASE(a_locale_with_decimal_commas_changes_nothing),
    CASE(the_surroundings_stay_as_they_are),
    CASE(a_host_without_standard_streams_is_served),
    {0},
};
