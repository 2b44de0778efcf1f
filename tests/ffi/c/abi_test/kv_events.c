// KV events: a router in C that scores two engines by prefix overlap.
#include "abi_test.h"

enum { MAX_BLOCKS = 512 };

// The blocks that a router knows of one engine.
typedef struct {
    uint8_t hashes[MAX_BLOCKS][32];
    uint64_t len, sequence, cleared;
} known_blocks;

static uint64_t place_of(const known_blocks *known, const uint8_t *hash) {
    uint64_t place = 0;
    while (place < known->len && memcmp(known->hashes[place], hash, 32) != 0) place++;
    return place;
}

static void apply(known_blocks *known, const pllm_kv_event *event) {
    uint64_t place = event->hash ? place_of(known, event->hash) : 0;
    CHECK(event->struct_size == sizeof *event && event->time_seconds > 1e9);
    CHECK(event->medium == PLLM_KV_MEDIUM_POOL && event->group == 0 && event->reserved == 0);
    int is_stored = event->kind == PLLM_KV_EVENT_STORED;
    CHECK(!event->parent_hash == !is_stored && !event->tokens == !is_stored);
    CHECK(event->tokens_len == (is_stored ? 16 : 0));
    if (is_stored && CHECK(place == known->len && place < MAX_BLOCKS))
        memcpy(known->hashes[known->len++], event->hash, 32);
    if (event->kind == PLLM_KV_EVENT_REMOVED && CHECK(place < known->len))
        memcpy(known->hashes[place], known->hashes[--known->len], 32);
    if (event->kind == PLLM_KV_EVENT_CLEARED) known->len = 0, known->cleared++;
    CHECK(known->cleared || event->sequence_number - known->sequence <= 1);
    known->sequence = event->sequence_number;
}

static void apply_all(known_blocks *known, pllm_kv_events *events) {
    for (uint64_t i = 0; i < pllm_kv_events_len(events); i++)
        apply(known, pllm_kv_events_get(events, i));
    CHECK(pllm_kv_events_get(events, pllm_kv_events_len(events)) == NULL);
    pllm_kv_events_free(events);
}

static void read_events(const pllm_engine *engine, known_blocks *known) {
    pllm_kv_events *events;
    if (OK(pllm_engine_poll_kv_events(engine, 0, &events))) apply_all(known, events);
}

static pllm_engine *open_with_events(uint64_t capacity) {
    pllm_engine_options options = options_for(golden_dir);
    options.kv_events_capacity = capacity;
    pllm_engine *engine = NULL;
    OK(pllm_engine_create(&options, &engine));
    return engine;
}

// A request for `len` tokens, which differ between seeds from token `common` on.
static pllm_request prompt_of(const pllm_sampling *sampling, uint32_t *tokens, uint32_t len,
                              uint32_t common, uint32_t seed) {
    for (uint32_t i = 0; i < len; i++) tokens[i] = 3 + (i + (i < common ? 0 : seed)) % 50;
    pllm_request request = token_request(sampling);
    request.prompt_token_ids = tokens;
    request.prompt_token_ids_len = len;
    return request;
}

// Returns the number of blocks at the start of the prompt that the router knows.
static uint64_t overlap(const pllm_engine *engine, const known_blocks *known,
                        const pllm_request *request) {
    pllm_bytes *hashes;
    if (!OK(pllm_engine_hash_prompt(engine, request, 0, &hashes))) return 0;
    const uint8_t *data = (const uint8_t *)pllm_bytes_data(hashes);
    uint64_t len = pllm_bytes_len(hashes) / 32, found = 0;
    CHECK(pllm_bytes_len(hashes) == 32 * (request->prompt_token_ids_len / 16));
    while (found < len && place_of(known, data + 32 * found) < known->len) found++;
    pllm_bytes_free(hashes);
    return found;
}

static void a_router_knows_the_prefixes_of_two_engines(void) {
    static known_blocks known[2];
    uint32_t tokens[2][48];
    pllm_sampling sampling = long_sampling();
    pllm_engine *engines[] = {open_with_events(1000), open_with_events(1000)};
    pllm_request first = prompt_of(&sampling, tokens[0], 48, 16, 0);
    pllm_request second = prompt_of(&sampling, tokens[1], 48, 16, 7);
    run_request(engines[0], &first);
    run_request(engines[1], &second);
    for (int i = 0; i < 2; i++) read_events(engines[i], &known[i]);
    for (int i = 0; i < 2; i++) {
        CHECK(overlap(engines[i], &known[0], &first) == 3);
        CHECK(overlap(engines[i], &known[1], &first) == 1);
        CHECK(overlap(engines[i], &known[0], &second) == 1);
    }
    first.cache_salt = (const uint8_t *)"tenant";
    first.cache_salt_len = 6;
    CHECK(overlap(engines[0], &known[0], &first) == 0);
    for (int i = 0; i < 2; i++) pllm_engine_free(engines[i]);
}

static void a_slow_reader_gets_a_snapshot(void) {
    static known_blocks known, listed;
    uint32_t tokens[48];
    pllm_sampling sampling = long_sampling();
    pllm_engine *engine = open_with_events(2);
    for (uint32_t seed = 0; seed < 4; seed++) {
        pllm_request request = prompt_of(&sampling, tokens, 48, 0, seed);
        run_request(engine, &request);
    }
    read_events(engine, &known);
    CHECK(known.cleared == 1 && known.len >= 12);
    pllm_kv_events *events;
    if (OK(pllm_engine_snapshot_kv_events(engine, &events))) apply_all(&listed, events);
    CHECK(listed.len == known.len && listed.sequence == known.sequence);
    for (uint64_t i = 0; i < known.len; i++) CHECK(place_of(&listed, known.hashes[i]) < listed.len);
    double start = now();
    if (OK(pllm_engine_poll_kv_events(engine, 30, &events))) {
        CHECK(pllm_kv_events_len(events) == 0 && now() - start >= 0.03);
        pllm_engine_free(engine);
        CHECK(pllm_kv_events_get(events, 0) == NULL);
        pllm_kv_events_free(events);
    }
}

static void a_batch_outlives_its_engine(void) {
    static known_blocks known;
    uint32_t tokens[48];
    pllm_sampling sampling = long_sampling();
    pllm_engine *engine = open_with_events(1000);
    pllm_request request = prompt_of(&sampling, tokens, 48, 0, 0);
    run_request(engine, &request);
    pllm_kv_events *events = NULL;
    OK(pllm_engine_poll_kv_events(engine, 0, &events));
    pllm_engine_free(engine);
    CHECK(pllm_kv_events_len(events) >= 3);
    CHECK(!memcmp(pllm_kv_events_get(events, 0)->tokens, tokens, 16 * sizeof *tokens));
    apply_all(&known, events);
}

static void wrong_calls_are_refused(const pllm_engine *engine) {
    pllm_kv_events *events = UNTOUCHED;
    UNSUPPORTED(pllm_engine_poll_kv_events(engine, 0, &events));
    UNSUPPORTED(pllm_engine_snapshot_kv_events(engine, &events));
    INVALID(pllm_engine_poll_kv_events(NULL, 0, &events));
    INVALID(pllm_engine_poll_kv_events(engine, 0, NULL));
    INVALID(pllm_engine_snapshot_kv_events(NULL, &events));
    INVALID(pllm_engine_snapshot_kv_events(engine, NULL));
    CHECK(events == UNTOUCHED);
    CHECK(pllm_kv_events_len(NULL) == 0 && pllm_kv_events_get(NULL, 0) == NULL);
    pllm_kv_events_free(NULL);
    pllm_sampling sampling = greedy();
    pllm_request request = token_request(&sampling);
    pllm_bytes *hashes = UNTOUCHED;
    INVALID(pllm_engine_hash_prompt(NULL, &request, 0, &hashes));
    INVALID(pllm_engine_hash_prompt(engine, NULL, 0, &hashes));
    INVALID(pllm_engine_hash_prompt(engine, &request, 0, NULL));
    INVALID(pllm_engine_hash_prompt(engine, &request, 1, &hashes));
    INVALID(pllm_engine_hash_prompt(engine, &request, UINT32_MAX, &hashes));
    request.struct_size = 8;
    INVALID(pllm_engine_hash_prompt(engine, &request, 0, &hashes));
    request = text_request("hello", &sampling);
    UNSUPPORTED(pllm_engine_hash_prompt(engine, &request, 0, &hashes));
    CHECK(hashes == UNTOUCHED);
}

static void wrong_capacities_are_refused(void) {
    pllm_engine_options options = options_for(golden_dir);
    pllm_engine *engine = UNTOUCHED;
    options.kv_events_capacity = (1 << 20) + 1;
    INVALID(pllm_engine_create(&options, &engine));
    options.kv_events_capacity = UINT64_MAX;
    INVALID(pllm_engine_create(&options, &engine));
    options.kv_events_capacity = 1;
    options.flags |= PLLM_ENGINE_NO_PREFIX_CACHE;
    INVALID(pllm_engine_create(&options, &engine));
    CHECK(engine == UNTOUCHED);
}

const test kv_events_tests[] = {
    ALONE(a_router_knows_the_prefixes_of_two_engines),
    ALONE(a_slow_reader_gets_a_snapshot),
    ALONE(a_batch_outlives_its_engine),
    WITH_GOLDEN(wrong_calls_are_refused),
    ALONE(wrong_capacities_are_refused),
    {0},
};
