// References: tokens of a prompt do not depend on policies, preemption, swapping, resized budgets
// or other requests.
#include "fuzz.h"

enum { MODELS = 2, DTYPES = 6, REFERENCES = 6, MAX_PROMPT_TOKENS = 33 };

// Lengths around the block sizes.
static const uint64_t prompt_lens[REFERENCES] = {1, 7, 8, 16, 17, MAX_PROMPT_TOKENS};
static uint32_t prompts[REFERENCES][MAX_PROMPT_TOKENS],
    references[MODELS][DTYPES][REFERENCES][REFERENCE_TOKENS];

static void write_prompts(void) {
    for (uint32_t q = 0; q < REFERENCES; q++)
        for (uint32_t i = 0; i < MAX_PROMPT_TOKENS; i++) prompts[q][i] = 3 + (q * 11 + i * 7) % 50;
}

static void expect_success(pllm_error *error) {
    EXPECT(!error, "a reference engine failed: %s", pllm_error_message(error));
}

static void fill_request(unsigned reference_index, pllm_request *q, pllm_sampling *s) {
    q->prompt_token_ids = prompts[reference_index];
    q->prompt_token_ids_len = prompt_lens[reference_index];
    s->flags = PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS;
    s->seed = reference_index;
    s->temperature = reference_index % 2 ? 1 : 0;
    s->max_tokens = REFERENCE_TOKENS;
}

static void generate_reference(const pllm_engine *engine, unsigned reference_index,
                               uint32_t *reference) {
    pllm_request q;
    pllm_sampling s;
    pllm_step step = {.struct_size = sizeof step, .unfinished = 1};
    pllm_outputs *outputs;
    uint64_t id, len = 0;
    pllm_request_init(&q, sizeof q);
    pllm_sampling_init(&s, sizeof s);
    fill_request(reference_index, &q, &s);
    q.sampling = &s;
    expect_success(pllm_engine_add_request(engine, &q, &id));
    while (step.unfinished) expect_success(pllm_engine_step(engine, &step));
    expect_success(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        EXPECT(len + o->tokens_len <= REFERENCE_TOKENS, "a reference has too many tokens");
        if (o->tokens_len) memcpy(reference + len, o->tokens, o->tokens_len * sizeof *o->tokens);
        len += o->tokens_len;
    }
    EXPECT(len == REFERENCE_TOKENS, "a reference has too few tokens");
    pllm_outputs_free(outputs);
}

void references_generate(void) {
    static bool generated;
    if (generated) return;
    generated = true;
    write_prompts();
    for (unsigned model = 0; model < MODELS; model++)
        for (uint32_t dtype = 0; dtype < DTYPES; dtype++) {
            pllm_engine_options o;
            pllm_engine *engine;
            pllm_engine_options_init(&o, sizeof o);
            o.model_path = model ? golden_dir : model_dir;
            o.flags = PLLM_ENGINE_SKIP_TOKENIZER | PLLM_ENGINE_NO_PREFIX_CACHE;
            o.kv_bytes = 1 << 20;
            o.max_model_len = 64;
            o.kv_dtype = dtype;
            o.threads = 1;
            expect_success(pllm_engine_create(&o, &engine));
            for (unsigned q = 0; q < REFERENCES; q++)
                generate_reference(engine, q, references[model][dtype][q]);
            pllm_engine_free(engine);
        }
}

const uint32_t *reference_fill_request(const pllm_engine_options *o, unsigned n, pllm_request *q,
                                       pllm_sampling *s) {
    // Other instruction paths and other weight formats give other tokens.
    bool model_is_known = o->model_path == golden_dir || o->model_path == model_dir;
    if (o->isa != PLLM_ISA_AUTO || o->weight_format != PLLM_WEIGHTS_AS_STORED ||
        o->kv_dtype >= DTYPES || !model_is_known)
        return NULL;
    fill_request(n % REFERENCES, q, s);
    return references[o->model_path == golden_dir][o->kv_dtype][n % REFERENCES];
}
