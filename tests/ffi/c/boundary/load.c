// The progress of loading, and the host's right to stop it.
#include "boundary.h"

#include <pthread.h>

typedef struct {
    uint64_t calls, done, total;
    uint64_t cancel_at;  // the call that says stop, from 1; 0: none
    int64_t answer;      // what it says
    pthread_t thread;
} loading;

static int32_t follow(void *data, uint64_t done, uint64_t total) {
    loading *l = data;
    CHECK(pthread_equal(pthread_self(), l->thread));
    CHECK(done >= l->done && done <= total && total > 0 && (l->calls == 0 || total == l->total));
    CHECK(l->cancel_at == 0 || l->calls < l->cancel_at);  // not asked again
    l->calls++;
    l->done = done;
    l->total = total;
    return l->calls == l->cancel_at ? (int32_t)l->answer : 0;
}

static pllm_error *load(loading *l, pllm_engine **engine) {
    pllm_engine_options options = options_for(model_dir);
    options.progress = follow;
    options.progress_data = l;
    l->thread = pthread_self();
    return pllm_engine_create(&options, engine);
}

static loading load_whole(void) {
    loading l = {0};
    pllm_engine *engine = NULL;
    OK(load(&l, &engine));
    pllm_engine_free(engine);
    return l;
}

static void progress_rises_to_the_total(void) {
    loading l = load_whole();
    CHECK(l.calls > 2 && l.done == l.total && l.total >= 5 << 20);
    // A dry run loads nothing.
    loading none = {.thread = pthread_self()};
    pllm_engine_options options = options_for(model_dir);
    pllm_plan plan = {.struct_size = sizeof plan};
    options.progress = follow;
    options.progress_data = &none;
    OK(pllm_engine_plan(&options, &plan));
    CHECK(none.calls == 0);
}

static void loading_may_be_cancelled_at_any_call_and_leaves_nothing(void) {
    const uint64_t last = load_whole().calls;
    const int64_t answers[] = {1, -1, INT32_MIN};
    int descriptors_before = descriptors(), threads_before = threads();
    long resident = 0;
    for (int round = 0; round < 30; round++) {
        const uint64_t cancel_at[] = {1, 2, last / 2, last - 1, last};
        for (size_t i = 0; i < COUNT(cancel_at); i++) {
            loading l = {.cancel_at = cancel_at[i], .answer = answers[i % COUNT(answers)]};
            pllm_engine *engine = (void *)&l;
            FAILS(PLLM_E_CANCELLED, "", load(&l, &engine));
            CHECK(l.calls == cancel_at[i] && engine == (void *)&l);
        }
        if (round == 9) resident = resident_kib();
    }
    CHECK(descriptors() == descriptors_before);
    for (double end = now() + 5; threads() > threads_before && now() < end;) sleep_ms(1);
    CHECK(threads() <= threads_before);
    CHECK(SANITIZED || resident_kib() - resident < 2 << 10);  // the weights alone are 5 MiB
}

static int32_t use_another_engine(void *data, uint64_t done, uint64_t total) {
    answer *a = data;
    if (done == total && !a->ends) {
        pllm_engine *other = open_engine(model_dir);
        ask(other, NULL, 0, 5, a);
        step_to_the_end(other);
        pllm_engine_free(other);
    }
    return 0;
}

static void progress_may_use_other_engines(void) {
    pllm_engine_options options = options_for(model_dir);
    pllm_engine *engine = NULL;
    answer a = {0};
    options.progress = use_another_engine;
    options.progress_data = &a;
    OK(pllm_engine_create(&options, &engine));
    CHECK(is_whole(&a, 0, 5));
    pllm_engine_free(engine);
}

const test_case load_cases[] = {
    CASE(progress_rises_to_the_total),
    CASE(loading_may_be_cancelled_at_any_call_and_leaves_nothing),
    CASE(progress_may_use_other_engines),
    {0},
};
