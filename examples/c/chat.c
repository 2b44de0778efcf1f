// A conversation in a kept sequence, so that each turn computes only its new tokens. The
// conversation is forked into two continuations, and its last answer is JSON.
//
// usage: chat MODEL_DIR
#include <stdio.h>
#include <stdlib.h>

#include "pagedllm.h"

static pllm_engine *engine;

static void check(pllm_error *error) {
    if (!error) return;
    fprintf(stderr, "error %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    pllm_error_free(error);
    exit(1);
}

// Steps until no request is unfinished, and prints the answers.
static void run_and_print(void) {
    pllm_stats before = {.struct_size = sizeof before}, after = before;
    pllm_step step = {.struct_size = sizeof step};
    check(pllm_engine_get_stats(engine, &before));
    do check(pllm_engine_step(engine, &step));
    while (step.unfinished);
    check(pllm_engine_get_stats(engine, &after));
    pllm_outputs *outputs;
    check(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        printf("%.*s%.*s\n", (int)o->text_len, o->text ? o->text : "", (int)o->error_len, o->error ? o->error : "");
    }
    pllm_outputs_free(outputs);
    printf("  (prompt tokens computed: %d)\n", (int)(after.prompt_tokens - before.prompt_tokens));
}

// Appends and resumes the next turn, in the format of the bundled model's chat template.
static void ask(uint64_t conversation, const char *question, const pllm_sampling *sampling) {
    char turn[256];
    snprintf(turn, sizeof turn, "\n<|user|>\n%s<|end|>\n<|assistant|>\n", question);
    printf("> %s\n", question);
    pllm_tokens *tokens;
    pllm_resume resume;
    pllm_resume_init(&resume, sizeof resume);
    resume.sampling = sampling;
    check(pllm_engine_tokenize(engine, turn, PLLM_NUL_TERMINATED, 0, &tokens));
    check(pllm_sequence_append(engine, conversation, pllm_tokens_data(tokens), pllm_tokens_len(tokens)));
    check(pllm_sequence_resume(engine, conversation, &resume));
    pllm_tokens_free(tokens);
}

int main(int argc, char **argv) {
    pllm_engine_options options;
    pllm_sampling sampling;
    pllm_request request;
    pllm_fork fork;
    pllm_engine_options_init(&options, sizeof options);
    pllm_sampling_init(&sampling, sizeof sampling);
    pllm_request_init(&request, sizeof request);
    pllm_fork_init(&fork, sizeof fork);
    options.model_path = argc > 1 ? argv[1] : "examples/model";
    check(pllm_engine_create(&options, &engine));
    sampling.temperature = 0;
    sampling.output_kind = PLLM_OUTPUT_FINAL;  // one output for each answer
    request.prompt = "<s><|user|>\nMy name is Clara.<|end|>\n<|assistant|>\n";
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;
    request.sampling = &sampling;
    request.flags = PLLM_REQUEST_KEEP;
    uint64_t conversation, forks[2];
    check(pllm_engine_add_request(engine, &request, &conversation));
    printf("> My name is Clara.\n");
    run_and_print();
    ask(conversation, "What is my name?", &sampling);
    run_and_print();
    fork.n = 2;
    check(pllm_sequence_fork(engine, conversation, &fork, forks));
    for (uint32_t i = 0; i < fork.n; i++) {
        pllm_sampling sampled = sampling;
        sampled.temperature = 0.7f, sampled.max_tokens = 12;
        sampled.flags = PLLM_SAMPLING_SEED, sampled.seed = 1 + i;
        ask(forks[i], "Tell me a story about a dog.", &sampled);
    }
    run_and_print();
    sampling.grammar_kind = PLLM_GRAMMAR_JSON_SCHEMA;
    sampling.grammar = "{\"type\": \"object\", \"required\": [\"name\", \"age\"], \"properties\": {\"name\": {\"type\": \"string\"},"
                       " \"age\": {\"type\": \"integer\"}, \"city\": {\"enum\": [\"Paris\", \"Rome\"]}}, \"additionalProperties\": false}";
    ask(conversation, "Give JSON for Anna, 31, Paris.", &sampling);
    run_and_print();
    pllm_engine_free(engine);
}
