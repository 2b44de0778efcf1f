// Proves that ThreadSanitizer checks the library: a thread writes to a text while the library reads it.
// The sanitizer must report this race and end the process.
// usage: tsan_proof MODEL_DIR
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "pagedllm.h"

static char text[] = "What is the capital of France?";
static atomic_int stopped;

static void *write_to_the_text(void *unused) {
    while (!atomic_load_explicit(&stopped, memory_order_relaxed)) text[0] ^= 1;
    return unused;
}

int main(int argc, char **argv) {
    pllm_engine_options options;
    pllm_engine *engine = NULL;
    pthread_t writer;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = argc > 1 ? argv[1] : "";
    options.kv_bytes = 8 << 20;
    if (pllm_engine_create(&options, &engine)) return 2;
    if (pthread_create(&writer, NULL, write_to_the_text, NULL)) return 2;
    for (int i = 0; i < 1000; i++) {
        pllm_tokens *tokens = NULL;
        pllm_error_free(pllm_engine_tokenize(engine, text, sizeof text - 1, 0, &tokens));
        pllm_tokens_free(tokens);
    }
    atomic_store(&stopped, 1);
    pthread_join(writer, NULL);
    pllm_engine_free(engine);
    puts("no race was reported");
}
