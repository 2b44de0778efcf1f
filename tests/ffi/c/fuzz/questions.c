// What a question is answered does not depend on what happens around it: policies, preemption, swapping, resizes, neighbours.
#include "fuzz.h"

enum { MODELS = 2, DTYPES = 6, QUESTIONS = 6, LONGEST_PROMPT = 33 };

// On both sides of the edges of blocks.
static const uint64_t prompt_lens[QUESTIONS] = {1, 7, 8, 16, 17, LONGEST_PROMPT};
static uint32_t prompts[QUESTIONS][LONGEST_PROMPT], answers[MODELS][DTYPES][QUESTIONS][LONGEST_ANSWER];

static void write_prompts(void) {
    for (uint32_t q = 0; q < QUESTIONS; q++)
        for (uint32_t i = 0; i < LONGEST_PROMPT; i++) prompts[q][i] = 3 + (q * 11 + i * 7) % 50;
}

static void expect_success(pllm_error *error) {
    EXPECT(!error, "an undisturbed engine failed: %s", pllm_error_message(error));
}

static void ask(unsigned question, pllm_request *q, pllm_sampling *s) {
    q->prompt_token_ids = prompts[question];
    q->prompt_token_ids_len = prompt_lens[question];
    s->flags = PLLM_SAMPLING_SEED | PLLM_SAMPLING_IGNORE_EOS;
    s->seed = question;
    s->temperature = question % 2 ? 1 : 0;
    s->max_tokens = LONGEST_ANSWER;
}

static void learn_answer(const pllm_engine *engine, unsigned question, uint32_t *answer) {
    pllm_request q;
    pllm_sampling s;
    pllm_step step = {.struct_size = sizeof step, .unfinished = 1};
    pllm_outputs *outputs;
    uint64_t id, len = 0;
    pllm_request_init(&q, sizeof q);
    pllm_sampling_init(&s, sizeof s);
    ask(question, &q, &s);
    q.sampling = &s;
    expect_success(pllm_engine_add_request(engine, &q, &id));
    while (step.unfinished) expect_success(pllm_engine_step(engine, &step));
    expect_success(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        EXPECT(len + o->tokens_len <= LONGEST_ANSWER, "an undisturbed engine says too much");
        if (o->tokens_len) memcpy(answer + len, o->tokens, o->tokens_len * sizeof *o->tokens);
        len += o->tokens_len;
    }
    EXPECT(len == LONGEST_ANSWER, "an undisturbed engine says too little");
    pllm_outputs_free(outputs);
}

void questions_learn(void) {
    static bool learnt;
    if (learnt) return;
    learnt = true;
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
            for (unsigned q = 0; q < QUESTIONS; q++) learn_answer(engine, q, answers[model][dtype][q]);
            pllm_engine_free(engine);
        }
}

const uint32_t *question_ask(const pllm_engine_options *o, unsigned n, pllm_request *q, pllm_sampling *s) {
    // Another instruction path has other sums, and other weights give other answers.
    bool model_is_known = o->model_path == golden_dir || o->model_path == model_dir;
    if (o->isa != PLLM_ISA_AUTO || o->weight_format != PLLM_WEIGHTS_AS_STORED || o->kv_dtype >= DTYPES || !model_is_known) return NULL;
    ask(n % QUESTIONS, q, s);
    return answers[o->model_path == golden_dir][o->kv_dtype][n % QUESTIONS];
}
