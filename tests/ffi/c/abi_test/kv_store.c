// A KV store in C: an engine writes the blocks of a prompt, and another engine reads them.
#include "abi_test.h"

enum { MAX_VALUES = 256, MAX_ENDED = 256 };

// A store in memory. Operations end when they start, and poll reports them. `pending` is the length
// of `ended`, the completions that have not been reported.
typedef struct {
    struct {
        uint8_t key[32];
        uint8_t *bytes;
        uint64_t len;
    } values[MAX_VALUES];
    uint64_t len, pending, puts, hits, closed;
    pllm_kv_completion ended[MAX_ENDED];
    int damages, hangs;
} memory_store;

static int end_operation(memory_store *store, uint64_t token, uint32_t status, uint64_t bytes) {
    if (store->hangs) return 0;
    if (store->pending == MAX_ENDED) return 1;
    store->ended[store->pending++] =
        (pllm_kv_completion){.token = token, .status = status, .bytes = bytes};
    return 0;
}

static uint64_t place_of(const memory_store *store, const uint8_t *key) {
    uint64_t place = 0;
    while (place < store->len && memcmp(store->values[place].key, key, 32) != 0) place++;
    return place;
}

static int32_t store_exists(void *user_data, uint64_t token, const uint8_t *keys, uint64_t keys_len,
                            uint8_t *out_found) {
    memory_store *store = user_data;
    for (uint64_t i = 0; i < keys_len; i++)
        out_found[i] = place_of(store, keys + 32 * i) < store->len;
    return end_operation(store, token, PLLM_KV_DONE, 0);
}

static int32_t store_get(void *user_data, uint64_t token, const uint8_t *key,
                         const pllm_kv_buffer *buffers, uint64_t buffers_len) {
    memory_store *store = user_data;
    uint64_t place = place_of(store, key), done = 0;
    if (place == store->len) return end_operation(store, token, PLLM_KV_MISSING, 0);
    for (uint64_t i = 0; i < buffers_len && done + buffers[i].len <= store->values[place].len; i++) {
        memcpy(buffers[i].data, store->values[place].bytes + done, buffers[i].len);
        done += buffers[i].len;
    }
    if (store->damages) ((uint8_t *)buffers[buffers_len - 1].data)[0] ^= 1;
    store->hits++;
    return end_operation(store, token, PLLM_KV_DONE, store->values[place].len);
}

static int32_t store_put(void *user_data, uint64_t token, const uint8_t *key,
                         const pllm_kv_buffer *buffers, uint64_t buffers_len) {
    memory_store *store = user_data;
    if (place_of(store, key) < store->len) return end_operation(store, token, PLLM_KV_DONE, 0);
    if (store->len == MAX_VALUES) return end_operation(store, token, PLLM_KV_FAILED, 0);
    uint64_t len = 0;
    for (uint64_t i = 0; i < buffers_len; i++) len += buffers[i].len;
    uint8_t *bytes = malloc(len);
    if (!bytes) return 1;
    memcpy(store->values[store->len].key, key, 32);
    store->values[store->len].bytes = bytes;
    store->values[store->len++].len = len;
    for (uint64_t i = 0; i < buffers_len; bytes += buffers[i++].len)
        memcpy(bytes, buffers[i].data, buffers[i].len);
    store->puts++;
    return end_operation(store, token, PLLM_KV_DONE, 0);
}

static int32_t store_remove(void *user_data, uint64_t token, const uint8_t *key) {
    memory_store *store = user_data;
    uint64_t place = place_of(store, key);
    if (place < store->len) {
        free(store->values[place].bytes);
        store->values[place] = store->values[--store->len];
    }
    return end_operation(store, token, PLLM_KV_DONE, 0);
}

static uint64_t store_poll(void *user_data, uint64_t timeout_us,
                           pllm_kv_completion *out_completions, uint64_t capacity) {
    memory_store *store = user_data;
    if (!store->pending) usleep((useconds_t)timeout_us);
    uint64_t count = store->pending < capacity ? store->pending : capacity;
    memcpy(out_completions, store->ended, count * sizeof *out_completions);
    memmove(store->ended, store->ended + count, (store->pending - count) * sizeof *store->ended);
    store->pending -= count;
    return count;
}

static void store_close(void *user_data) { ((memory_store *)user_data)->closed++; }

static pllm_kv_store store_of(memory_store *memory) {
    pllm_kv_store store;
    pllm_kv_store_init(&store, sizeof store);
    store.user_data = memory;
    store.exists = store_exists;
    store.get = store_get;
    store.put = store_put;
    store.remove = store_remove;
    store.poll = store_poll;
    store.close = store_close;
    return store;
}

static void free_values(memory_store *store) {
    for (uint64_t i = 0; i < store->len; i++) free(store->values[i].bytes);
}

// Runs one request of 40 tokens on an engine with the store. Returns the statistics.
static pllm_stats run_with(const pllm_kv_store *store, generation *out) {
    uint32_t tokens[40];
    for (uint32_t i = 0; i < COUNT(tokens); i++) tokens[i] = 3 + i % 50;
    pllm_engine_options options = options_for(golden_dir);
    options.kv_store = store;
    options.kv_store_timeout_ms = 500;
    pllm_engine *engine;
    pllm_stats stats = {.struct_size = sizeof stats};
    if (!OK(pllm_engine_create(&options, &engine))) return stats;
    pllm_sampling sampling = long_sampling();
    pllm_request request = token_request(&sampling);
    request.prompt_token_ids = tokens;
    request.prompt_token_ids_len = COUNT(tokens);
    *out = *run_request(engine, &request);
    stats = stats_of(engine);
    pllm_engine_free(engine);
    return stats;
}

static void an_engine_reads_the_blocks_that_another_one_has_written(void) {
    static memory_store memory;
    static generation expected, first, second, third;
    const pllm_kv_store store = store_of(&memory);
    run_with(NULL, &expected);
    pllm_stats stats = run_with(&store, &first);
    CHECK(stats.kv_store_queries == 2 && stats.kv_store_hits == 0 && memory.puts >= 2);
    stats = run_with(&store, &second);
    CHECK(stats.kv_store_hits == 2 && memory.hits == 2 && stats.prompt_tokens_cached == 32);
    CHECK(stats.kv_store_failures == 0 && stats.kv_store_bytes_read > 0);
    memory.damages = 1;
    stats = run_with(&store, &third);
    CHECK(stats.kv_store_hits == 0 && stats.kv_store_failures == 2);
    CHECK(same_generation(&first, &expected));
    CHECK(same_generation(&second, &expected));
    CHECK(same_generation(&third, &expected));
    CHECK(memory.closed == 3);
    free_values(&memory);
}

static void an_engine_with_a_store_that_hangs_computes_and_is_freed(void) {
    static memory_store memory = {.hangs = 1};
    static generation expected, hung;
    const pllm_kv_store store = store_of(&memory);
    run_with(NULL, &expected);
    pllm_stats stats = run_with(&store, &hung);
    CHECK(stats.kv_store_hits == 0 && stats.kv_store_failures == 1 && memory.closed == 1);
    CHECK(same_generation(&hung, &expected));
    free_values(&memory);
}

static void incomplete_stores_are_refused(void) {
    static memory_store memory;
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine;
    for (int missing = 0; missing < 6; missing++) {
        pllm_kv_store store = store_of(&memory);
        if (missing == 0) store.exists = NULL;
        if (missing == 1) store.get = NULL;
        if (missing == 2) store.put = NULL;
        if (missing == 3) store.remove = NULL;
        if (missing == 4) store.poll = NULL;
        if (missing == 5) store.close = NULL;
        options.kv_store = &store;
        INVALID(pllm_engine_create(&options, &engine));
    }
    pllm_kv_store store = store_of(&memory);
    options.kv_store = &store;
    store.struct_size = sizeof store - 8;
    INVALID(pllm_engine_create(&options, &engine));
    store.struct_size = 0;
    INVALID(pllm_engine_create(&options, &engine));
    store.struct_size = sizeof store;
    options.flags |= PLLM_ENGINE_NO_PREFIX_CACHE;
    INVALID(pllm_engine_create(&options, &engine));
    options.flags &= ~PLLM_ENGINE_NO_PREFIX_CACHE;
    options.kv_store_secret = (const uint8_t *)"short";
    options.kv_store_secret_len = 5;
    INVALID(pllm_engine_create(&options, &engine));
    options.kv_store_secret = NULL;
    INVALID(pllm_engine_create(&options, &engine));
    options.kv_store_secret_len = 0;
    options.kv_store_max_operations = 65537;
    INVALID(pllm_engine_create(&options, &engine));
    CHECK(memory.closed == 0);
}

// The file of the trace is created last, when the thread of the store runs.
static void a_store_stays_with_the_host_if_no_engine_is_created(void) {
    static memory_store memory;
    const pllm_kv_store store = store_of(&memory);
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine;
    options.kv_store = &store;
    options.trace_path = "no/such/directory/trace";
    FAILS(PLLM_E_IO, pllm_engine_create(&options, &engine));
    CHECK(memory.closed == 0);
    options.trace_path = NULL;
    if (!OK(pllm_engine_create(&options, &engine))) return;
    pllm_engine_free(engine);
    CHECK(memory.closed == 1);
}

const test kv_store_tests[] = {
    ALONE(an_engine_reads_the_blocks_that_another_one_has_written),
    ALONE(an_engine_with_a_store_that_hangs_computes_and_is_freed),
    ALONE(incomplete_stores_are_refused),
    ALONE(a_store_stays_with_the_host_if_no_engine_is_created),
    {0},
};
