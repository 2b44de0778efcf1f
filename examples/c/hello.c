// Streams the answers to three prompts at once. The second request is aborted after a few tokens.
// usage: hello MODEL_DIR
#include <stdio.h>
#include <stdlib.h>

#include "pagedllm.h"

static void check(pllm_error *error) {
    if (!error) return;
    fprintf(stderr, "error %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    pllm_error_free(error);
    exit(1);
}

static uint64_t ask(pllm_engine *engine, const char *question, const pllm_sampling *sampling) {
    char json[256];
    snprintf(json, sizeof json, "[{\"role\": \"user\", \"content\": \"%s\"}]", question);
    pllm_bytes *prompt;
    check(pllm_engine_render_chat(engine, json, PLLM_NUL_TERMINATED, &prompt));
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = pllm_bytes_data(prompt);
    request.prompt_len = pllm_bytes_len(prompt);
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;  // the template has written the special tokens
    request.sampling = sampling;
    uint64_t id;
    check(pllm_engine_add_request(engine, &request, &id));
    pllm_bytes_free(prompt);
    printf("[%d] %s\n", (int)id, question);
    return id;
}

int main(int argc, char **argv) {
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = argc > 1 ? argv[1] : "examples/model";
    pllm_engine *engine;
    check(pllm_engine_create(&options, &engine));
    pllm_sampling greedy;
    pllm_sampling_init(&greedy, sizeof greedy);
    greedy.temperature = 0;
    ask(engine, "What is the capital of France?", &greedy);
    uint64_t story = ask(engine, "Tell me a short story.", &greedy);
    ask(engine, "What is 7 + 5?", &greedy);
    pllm_step step = {.struct_size = sizeof step};
    do {
        check(pllm_engine_step(engine, &step));
        pllm_outputs *outputs;
        check(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
        for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
            const pllm_output *o = pllm_outputs_get(outputs, i);
            static const char *const ends[] = {"", " (stop)", " (length)", " (abort)", " (error)"};
            const char *end = o->finish_reason < 5 ? ends[o->finish_reason] : " (ended)";
            printf("[%d] %.*s%s\n", (int)o->request, (int)o->text_len, o->text ? o->text : "", end);
            if (o->request == story && o->generated_tokens == 8 && !o->finish_reason) check(pllm_engine_abort(engine, story));
        }
        pllm_outputs_free(outputs);
    } while (step.unfinished);
    pllm_engine_free(engine);
}
