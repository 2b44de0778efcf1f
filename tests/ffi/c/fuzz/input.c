// Reads arguments from the bytes of a program, valid ones and invalid ones.
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fuzz.h"

// ---- numbers ----

uint8_t byte(worker *w) { return w->next < w->end ? *w->next++ : 0; }

uint64_t number(worker *w, unsigned bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | byte(w);
    return value;
}

unsigned below(worker *w, unsigned limit) { return byte(w) % limit; }

// The end of a program reads as zeros, so 0 counts as false.
bool one_in(worker *w, unsigned n) { return below(w, n) == n - 1; }

uint64_t interesting_u64(worker *w) {
    static const uint64_t values[] = {0,         1,          2,          3,         7,
                                      8,         15,         16,         255,       1 << 16,
                                      INT32_MAX, UINT32_MAX, 1ull << 41, INT64_MAX, UINT64_MAX};
    unsigned i = below(w, COUNT(values) + 2);
    return i < COUNT(values) ? values[i] : number(w, 8);
}

uint32_t interesting_u32(worker *w) { return (uint32_t)interesting_u64(w); }

float interesting_float(worker *w) {
    const float values[] = {0.0f, -0.0f, 0.5f, 1.0f, -1.0f,    1e-40f,   1.0001f,
                            1e4f, 1e30f, NAN,  -NAN, INFINITY, -INFINITY};
    unsigned i = below(w, COUNT(values) + 2);
    if (i < COUNT(values)) return values[i];
    uint32_t bits = (uint32_t)number(w, 4);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// ---- memory ----

enum { BUFFERS = 64, PAGE = 4096 };

static char *buffers_of(unsigned index) {
    static char *buffers[WORKERS];
    const size_t stride = BUFFER_BYTES + PAGE;
    if (buffers[index]) return buffers[index];
    char *at =
        mmap(NULL, BUFFERS * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) perror("mmap"), exit(2);
    for (unsigned i = 0; i < BUFFERS; i++)
        if (mprotect(at + i * stride + BUFFER_BYTES, PAGE, PROT_NONE)) perror("mprotect"), exit(2);
    return buffers[index] = at;
}

void *guarded(worker *w, uint64_t bytes) {
    if (w->buffers == BUFFERS || bytes > BUFFER_BYTES)
        fprintf(stderr, "the fuzzer ran out of guarded memory\n"), exit(2);
    char *end = buffers_of(w->index) + (size_t)w->buffers++ * (BUFFER_BYTES + PAGE) + BUFFER_BYTES;
    return memset(end - bytes, POISON, bytes);
}

uint64_t any_struct_size(worker *w, uint64_t first, uint64_t known) {
    if (!one_in(w, 8)) return known;
    const uint64_t sizes[] = {
        0,         4,         7,  8,       first,     first - 8,     known - 8,  known - 1,
        known + 1, known + 8, 96, 1 << 16, 65536 - 8, (1 << 16) + 8, 1ull << 40, UINT64_MAX};
    unsigned i = below(w, COUNT(sizes) + 8);
    return i < COUNT(sizes) ? sizes[i] : known + 8 * (uint64_t)below(w, 64);
}

void *struct_buffer(worker *w, uint64_t declared, uint64_t known) {
    uint64_t bytes = declared > BUFFER_BYTES ? known : declared < 8 ? 8 : declared;
    return guarded(w, (bytes + 7) & ~7ull);
}

// ---- texts ----

static const char *const texts[] = {
    "",
    "a",
    "Hello",
    "<s><|user|>\nWhat is the capital of France?<|end|>\n<|assistant|>\n",
    "<|end|>",
    "</s><s><s>",
    "na\u00efve \u65e5\u672c\u8a9e \U0001F600\U0001F468\u200D\U0001F469 e\u0301",
    "   \n\n\t  ",
    "The capital of France is Paris.",
    "\xEF\xBB\xBF bom",
    "\x7f\x01\x02",
    "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!",
    "123456789012345678901234567890",
};

static const char *const chats[] = {
    "[{\"role\": \"user\", \"content\": \"Hi\"}]",
    "[{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Yes?\"}, "
    "{\"role\": \"user\"}]",
    "[{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"\"}]",
    "{\"messages\": [{\"role\": \"user\", \"content\": \"\\u65e5 \\ud83d\\ude00\"}], "
    "\"add_generation_prompt\": false}",
    "{\"messages\": [{\"role\": \"system\", \"content\": \"<|end|>\"}], \"tools\": [{\"a\": [1, "
    "2.5, null, true]}], \"x\": {}}",
    "[]",
    "{}",
    "[{}]",
    "[{\"role\": 1, \"content\": null}]",
    "{\"messages\": 3}",
    "[{\"role\": \"user\", \"content\": \"\\ud800\"}]",
    "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"}]}]",
    "nonsense",
    "",
    "[1e999]",
    "\"\"",
    "null",
};

// A text of the pool, sometimes repeated, sometimes with a few changed bytes.
static uint64_t write_text(worker *w, char *to, uint64_t capacity, const char *const *pool,
                           unsigned pool_len) {
    unsigned kind = below(w, 16);
    uint64_t len = 0;
    const char *text = pool[below(w, pool_len)];
    uint64_t text_len = strlen(text), times = kind == 14 ? 1 + below(w, 64) : 1;
    for (; times > 0 && len + text_len <= capacity; times--, len += text_len)
        memcpy(to + len, text, text_len);
    unsigned changes = kind >= 12 && len ? 1 + below(w, 3) : 0;
    for (; changes > 0; changes--) to[number(w, 2) % len] = (char)byte(w);
    return len;
}

static argument text_from(worker *w, const char *const *pool, unsigned pool_len) {
    if (one_in(w, 32)) {
        uint64_t len = interesting_u64(w);
        return (argument){NULL, len, len != 0};
    }
    char text[4096];
    uint64_t len = one_in(w, 16) ? below(w, 64) : 0;
    for (uint64_t i = 0; i < len; i++) text[i] = (char)byte(w);
    if (!len) len = write_text(w, text, sizeof text, pool, pool_len);
    bool ends_with_nul = one_in(w, 4);
    char *at = guarded(w, len + ends_with_nul);
    memcpy(at, text, len);
    if (ends_with_nul) at[len] = 0;
    uint64_t read = ends_with_nul ? strlen(at) : one_in(w, 16) && len ? number(w, 2) % len : len;
    bool refused = !is_utf8(at, read);
    if (mutation == string_is_read_past_its_end && !ends_with_nul)
        read = strlen(at), ends_with_nul = true;
    if (!ends_with_nul && one_in(w, 64))
        return (argument){at, INT64_MAX, true};  // a miscomputed length
    return (argument){at, ends_with_nul ? PLLM_NUL_TERMINATED : read, refused};
}

argument any_text(worker *w) { return text_from(w, texts, COUNT(texts)); }

argument any_chat(worker *w) {
    if (!one_in(w, 32)) return text_from(w, chats, COUNT(chats));
    uint64_t depth = number(w, 2) % (BUFFER_BYTES / 2);  // deeper than any valid chat
    return (argument){memset(guarded(w, depth), byte(w) % 2 ? '[' : '{', depth), depth, false};
}

argument any_tokens(worker *w, uint32_t vocab) {
    if (one_in(w, 32)) {
        uint64_t len = interesting_u64(w);
        return (argument){NULL, len, len != 0};
    }
    uint64_t len = one_in(w, 16) ? byte(w) : below(w, 12);
    uint32_t *at = guarded(w, len * sizeof *at);
    for (uint64_t i = 0; i < len; i++) at[i] = (uint32_t)number(w, 2) % (vocab ? vocab : 256);
    if (len && one_in(w, 16)) at[byte(w) % len] = interesting_u32(w);
    if (one_in(w, 64)) return (argument){at, INT64_MAX, true};
    return (argument){at, len, false};
}

// ---- checksums and text ----

uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

uint64_t mix_bytes(uint64_t hash, const void *data, uint64_t len) {
    for (uint64_t i = 0; i < len; i++) hash = mix(hash, ((const uint8_t *)data)[i]);
    return mix(hash, len);
}

// By the table of the Unicode standard: no surrogates, no overlong forms, nothing beyond U+10FFFF.
bool is_utf8(const void *data, uint64_t len) {
    if (len == 0) return true;
    const uint8_t *at = data, *end = at + len;
    while (at < end) {
        uint8_t first = *at++;
        if (first < 0x80) continue;
        unsigned more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4 || (uint64_t)(end - at) < more) return false;
        uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (*at < low || *at > high) return false;
        for (at++; --more > 0; at++)
            if (*at < 0x80 || *at > 0xBF) return false;
    }
    return true;
}
