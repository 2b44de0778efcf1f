// The progress callback of pllm_engine_create, and cancelling through it.
#include "boundary.h"

#include <pthread.h>

typedef struct {
    uint64_t calls, done, total;
    uint64_t cancel_at;    // the call that cancels, from 1; 0: never
    int64_t return_value;  // its return value
    pthread_t thread;
} progress_record;

static int32_t record_progress(void *data, uint64_t done, uint64_t total) {
    progress_record *l = data;
    CHECK(pthread_equal(pthread_self(), l->thread));
    CHECK(done >= l->done && done <= total && total > 0 && (l->calls == 0 || total == l->total));
    CHECK(l->cancel_at == 0 || l->calls < l->cancel_at);  // no call after a cancel
    l->calls++;
    l->done = done;
    l->total = total;
    return l->calls == l->cancel_at ? (int32_t)l->return_value : 0;
}

static pllm_error *load(progress_record *l, pllm_engine **engine) {
    pllm_engine_options options = options_for(model_dir);
    options.progress = record_progress;
    options.progress_data = l;
    l->thread = pthread_self();
    return pllm_engine_create(&options, engine);
}

static progress_record load_completely(void) {
    progress_record l = {0};
    pllm_engine *engine = NULL;
    OK(load(&l, &engine));
    pllm_engine_free(engine);
    return l;
}

static void progress_increases_to_the_total(void) {
    progress_record l = load_completely();
    CHECK(l.calls > 2 && l.done == l.total && l.total >= 5 << 20);
    // pllm_engine_plan loads no weights.
    progress_record none = {.thread = pthread_self()};
    pllm_engine_options options = options_for(model_dir);
    pllm_plan plan = {.struct_size = sizeof plan};
    options.progress = record_progress;
    options.progress_data = &none;
    OK(pllm_engine_plan(&options, &plan));
    CHECK(none.calls == 0);
}

static void loading_can_be_cancelled_at_any_call_without_leaks(void) {
    const uint64_t last = load_completely().calls;
    const int64_t return_values[] = {1, -1, INT32_MIN};
    int descriptors_before = descriptor_count(), threads_before = thread_count();
    long resident = 0;
    for (int round = 0; round < 30; round++) {
        const uint64_t cancel_at[] = {1, 2, last / 2, last - 1, last};
        for (size_t i = 0; i < COUNT(cancel_at); i++) {
            progress_record l = {.cancel_at = cancel_at[i],
                                 .return_value = return_values[i % COUNT(return_values)]};
            pllm_engine *engine = (void *)&l;
            FAILS(PLLM_E_CANCELLED, "", load(&l, &engine));
            CHECK(l.calls == cancel_at[i] && engine == (void *)&l);
        }
        if (round == 9) resident = resident_kib();
    }
    CHECK(descriptor_count() == descriptors_before);
    CHECK(thread_count_falls_to(threads_before));
    CHECK(SANITIZED || resident_kib() - resident < 2 << 10);  // the weights alone have 5 MiB
}

static int32_t use_another_engine(void *data, uint64_t done, uint64_t total) {
    generation *a = data;
    if (done == total && !a->ends) {
        pllm_engine *other = open_engine(model_dir);
        add_prompt(other, NULL, 0, 5, a);
        step_to_the_end(other);
        pllm_engine_free(other);
    }
    return 0;
}

static void progress_callback_may_use_other_engines(void) {
    pllm_engine_options options = options_for(model_dir);
    pllm_engine *engine = NULL;
    generation a = {0};
    options.progress = use_another_engine;
    options.progress_data = &a;
    OK(pllm_engine_create(&options, &engine));
    CHECK(is_complete(&a, 0, 5));
    pllm_engine_free(engine);
}

const test progress_tests[] = {
    TEST(progress_increases_to_the_total),
    TEST(loading_can_be_cancelled_at_any_call_without_leaks),
    TEST(progress_callback_may_use_other_engines),
    {0},
};
