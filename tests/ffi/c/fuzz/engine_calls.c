// Calls on engines: plan, create, info, statistics, step, start, stop.
#include "program.h"

typedef struct {
    unsigned calls, cancel_at;
    uint64_t done;
} load_progress;

static int32_t check_progress(void *progress_data, uint64_t done, uint64_t total) {
    load_progress *l = progress_data;
    if (!l) return 0;  // a struct_size between progress and progress_data
    EXPECT(done >= l->done && done <= total, "progress went from %llu to %llu of %llu",
           LLU(l->done), LLU(done), LLU(total));
    l->done = done;
    return ++l->calls == l->cancel_at ? (int32_t)(l->cancel_at % 2 ? 1 : INT32_MIN) : 0;
}

static void choose_model(worker *w, pllm_engine_options *o) {
    bool tiny = below(w, 2);
    o->model_path = tiny ? golden_dir : model_dir;
    o->flags = (tiny || one_in(w, 6) ? PLLM_ENGINE_SKIP_TOKENIZER : 0) |
               (one_in(w, 4) ? PLLM_ENGINE_NO_PREFIX_CACHE : 0);
    if (one_in(w, 16)) {
        argument path = any_text(w);
        o->model_path = path.data;
        o->model_path_len = path.len;
    }
    if (one_in(w, 16)) {
        argument device = any_text(w);
        o->device = device.data;
        o->device_len = device.len;
    }
}

static void choose_sizes(worker *w, pllm_engine_options *o) {
    o->kv_bytes = (uint64_t)(1 + below(w, 16)) << (12 + below(w, 7));
    o->block_size = 8u << below(w, 3);
    o->max_model_len = below(w, 2) ? 16 + below(w, 100) : 0;
    o->max_seqs = 1 + below(w, 6);
    o->max_batch_tokens = o->max_seqs + below(w, 32);
    o->prefill_chunk = below(w, 2) ? 1 + below(w, 24) : 0;
    o->queue_capacity = below(w, 2) ? 0 : 1 + below(w, 8);
    o->seed = byte(w);
    o->threads = 1;
}

static void choose_policies(worker *w, pllm_engine_options *o) {
    const uint32_t dtypes[] = {PLLM_DTYPE_INT8, PLLM_DTYPE_F16, PLLM_DTYPE_FP8};
    const uint32_t weights[] = {PLLM_WEIGHTS_F16, PLLM_WEIGHTS_INT8, PLLM_WEIGHTS_INT4,
                                PLLM_WEIGHTS_INT4_ASYMMETRIC};
    o->kv_dtype = one_in(w, 3) ? dtypes[below(w, 3)] : PLLM_DTYPE_AUTO;
    // The tiny model's columns are no multiple of the group size, so it has no int4.
    uint32_t formats = o->model_path == golden_dir ? 2 : 4;
    o->weight_format = one_in(w, 4) ? weights[below(w, formats)] : PLLM_WEIGHTS_AS_STORED;
    bool grouped =
        o->weight_format == PLLM_WEIGHTS_INT4 || o->weight_format == PLLM_WEIGHTS_INT4_ASYMMETRIC;
    o->weight_group = grouped && below(w, 2) ? 32 << below(w, 2) : 0;
    o->order = below(w, 3);
    o->batching = below(w, 4);
    o->allocation = below(w, 2);
    // Results that depend on time are not repeatable: 24 hours never pass.
    o->ageing_ms = program.may_start ? below(w, 4) : 24 * 60 * 60 * 1000;
    if (below(w, 2)) o->prefill_budget = 1 + below(w, 32);
    if (one_in(w, 3)) o->max_waiting_requests = 1 + below(w, 3);
    if (one_in(w, 3)) o->max_waiting_tokens = 1 + byte(w);
    if (one_in(w, 8)) o->max_prompt_bytes = 1 + byte(w);
    bool has_cache = !(o->flags & PLLM_ENGINE_NO_PREFIX_CACHE);
    if (has_cache && below(w, 2)) o->kv_events_capacity = 1 + byte(w);
}

static void choose_memory(worker *w, pllm_engine_options *o) {
    if (below(w, 2)) {
        // The costs of swapping depend on time.
        o->preemption =
            program.may_start && below(w, 2) ? PLLM_PREEMPTION_AUTO : PLLM_PREEMPTION_SWAP;
        o->swap_bytes = (uint64_t)(1 + below(w, 16)) << (12 + below(w, 5));
    }
    o->budget = one_in(w, 3) ? program.budgets[below(w, BUDGETS)] : NULL;
    if (o->budget) o->kv_bytes = 0;
}

// Most of these values are refused. In a dry run they may be large, because nothing is allocated.
static void corrupt_an_option(worker *w, pllm_engine_options *o, bool dry) {
    static const uint32_t invalid[] = {0, UINT32_MAX, (1 << 20) + 1, 1u << 31};
    uint32_t value = dry ? interesting_u32(w) : invalid[below(w, COUNT(invalid))];
    switch (below(w, 26)) {
    case 0: o->kv_bytes = dry ? interesting_u64(w) : below(w, 200); break;
    case 1: o->block_size = interesting_u32(w); break;
    case 2: o->kv_dtype = interesting_u32(w); break;
    case 3: o->max_model_len = interesting_u32(w); break;
    case 4: o->max_batch_tokens = value; break;
    case 5: o->max_seqs = value; break;
    case 6: o->prefill_chunk = interesting_u32(w); break;
    case 7: o->threads = value; break;
    case 8: o->isa = interesting_u32(w); break;
    case 9: o->flags = interesting_u32(w); break;
    case 10: o->reserved = interesting_u32(w); break;
    case 11: o->order = interesting_u32(w); break;
    case 12: o->batching = interesting_u32(w); break;
    case 13: o->allocation = interesting_u32(w); break;
    case 14: o->preemption = PLLM_PREEMPTION_AUTO + 1 + interesting_u32(w) % 8; break;
    case 15: o->swap_bytes = 0, o->swap_path = "/nonexistent"; break;
    case 16:
        *(below(w, 2) ? &o->trace_path : &o->journal_path) = below(w, 2) ? "" : "/nonexistent/file";
        break;
    case 17: o->packed_path = below(w, 2) ? "" : dry ? "/nonexistent" : "/dev/null"; break;
    case 18: o->cpus = below(w, 2) ? "0-" : "1023,1022"; break;
    case 19:
        o->device = below(w, 2) ? "cuda:99" : "cuda:", o->device_len = PLLM_NUL_TERMINATED;
        break;
    case 20: o->memory_fraction = below(w, 2) ? 0.5f : -1.0f; break;
    case 21: o->weight_format = interesting_u32(w); break;
    case 22: o->weight_group = interesting_u32(w); break;
    case 23: o->kv_events_capacity = interesting_u64(w); break;
    // Without a communicator, or with too many workers.
    case 24: *(below(w, 2) ? &o->tensor_parallel : &o->pipeline_parallel) = 2 + interesting_u32(w); break;
    default: o->queue_capacity = interesting_u64(w); break;
    }
}

// `known` receives the options as the library sees them.
static pllm_engine_options *any_options(worker *w, bool dry, load_progress *l,
                                        pllm_engine_options *known, uint64_t *declared) {
    pllm_engine_options *at = any_input_struct(w, &options_type, known, declared);
    choose_model(w, known);
    choose_sizes(w, known);
    choose_policies(w, known);
    choose_memory(w, known);
    while (one_in(w, dry ? 2 : 6)) corrupt_an_option(w, known, dry);
    if (below(w, 2)) {
        known->progress = check_progress;
        known->progress_data = l;
        l->cancel_at = one_in(w, 4) ? 1 + below(w, 12) : 0;
    }
    return copy_fields(at, &options_type, known, *declared);
}

void plan_engine(worker *w) {
    pllm_engine_options known;
    pllm_plan plan;
    uint64_t declared;
    load_progress l = {0};
    const pllm_engine_options *options = any_options(w, true, &l, &known, &declared);
    if (one_in(w, 32)) options = NULL;
    out_struct out = any_out_struct(w, 80, sizeof plan);
    int32_t code = TRY(pllm_engine_plan, options, out.at);
    EXPECT(code || options, "plan with NULL options succeeded");
    EXPECT(l.calls == 0, "pllm_engine_plan called the progress callback");
    if (!check_out_struct(&out, code, &plan)) return;
    w->hash = mix_bytes(w->hash, &plan, sizeof plan);
    EXPECT(plan.max_model_len <= plan.blocks * plan.block_size && plan.full_sequences >= 1 &&
               plan.kv_bytes == plan.blocks * plan.block_bytes && plan.max_blocks >= plan.blocks,
           "the numbers of a plan are inconsistent");
}

static void read_model_info(worker *w, engine_slot *e) {
    pllm_model_info info = {.struct_size = sizeof info};
    EXPECT(TRY(pllm_engine_get_model_info, e->engine, &info) == 0,
           "get_model_info of a new engine failed");
    e->vocab = (uint32_t)info.vocab_size;
    e->max_model_len = info.max_model_len;
}

void create_engine(worker *w) {
    engine_slot *e = &program.engines[below(w, ENGINES)];
    if (e->engine) return;
    pllm_engine_options known;
    uint64_t declared;
    load_progress l = {0};
    const pllm_engine_options *options = any_options(w, false, &l, &known, &declared);
    if (one_in(w, 32)) options = NULL;
    out_parameter *out = any_out_parameter(w);
    int32_t code = TRY(pllm_engine_create, options, out ? (pllm_engine **)&out->pointer : NULL);
    check_out_parameter(out, code, sizeof out->pointer);
    EXPECT(code || options, "create with NULL options succeeded");
    bool cancelled = l.cancel_at != 0 && l.calls == l.cancel_at;
    EXPECT((code == PLLM_E_CANCELLED) == cancelled, "%u calls of the progress callback, code %d",
           l.calls, code);
    if (code) return;
    *e = (engine_slot){.engine = out->pointer, .number = ++program.last_number, .options = known};
    e->has_text = !(known.flags & PLLM_ENGINE_SKIP_TOKENIZER);
    e->own = (queue_slot){.queue = CALL(pllm_engine_queue, e->engine),
                          .number = ++program.last_number,
                          .engine = e->number};
    EXPECT(e->own.queue, "an engine has no queue");
    read_model_info(w, e);
}

void get_model_info(worker *w) {
    engine_slot *e = any_engine(w);
    pllm_model_info info;
    out_struct out = any_out_struct(w, 96, sizeof info);
    int32_t code = TRY(pllm_engine_get_model_info, e->engine, out.at);
    EXPECT(e->engine ? !code == has_valid_size(&out) : code == PLLM_E_INVALID_ARGUMENT,
           "get_model_info: code %d", code);
    if (!check_out_struct(&out, code, &info)) return;
    EXPECT(is_utf8(info.architecture, info.architecture_len) && is_utf8(info.isa, info.isa_len),
           "the model's info is not UTF-8");
    EXPECT(info.vocab_size == e->vocab && info.max_model_len <= info.max_positions,
           "the model's info changed");
    w->hash = mix_bytes(w->hash, info.eos_token_ids, info.eos_token_ids_len * sizeof(uint32_t));
}

uint64_t ended_of(const pllm_stats *s) {
    return s->finished_stop + s->finished_length + s->finished_abort + s->finished_error +
           s->finished_deadline;
}

void check_stats(const engine_slot *e, const pllm_stats *s) {
    EXPECT(s->blocks_used + s->blocks_free + s->blocks_cached == s->blocks_total,
           "the blocks of the statistics are inconsistent");
    EXPECT(s->paused <= s->waiting && s->slot_utilization >= 0 && s->slot_utilization <= 1,
           "the statistics are inconsistent");
    if (!program.racing) {
        totals sum = oracle_totals(e->number);
        uint64_t sequences = sum.sequences + oracle_pin_count(e->number);
        EXPECT(ended_of(s) <= sum.runs + sum.uncertain &&
                   s->waiting + s->running + s->idle <= sequences,
               "the statistics count more requests than were added");
    }
    EXPECT(s->prefix_hits <= s->prefix_queries, "prefix_hits exceeds prefix_queries");
    bool swaps_are_consistent = s->preemptions_swapped <= s->preemptions &&
                                s->swap_blocks_used <= s->swap_blocks_total &&
                                s->swap_failures == 0;
    EXPECT(swaps_are_consistent && !s->swapped == !s->swap_blocks_used,
           "the swap statistics are inconsistent: %llu of %llu preempted, %llu sequences in %llu "
           "of %llu blocks, %llu failures",
           LLU(s->preemptions_swapped), LLU(s->preemptions), LLU(s->swapped),
           LLU(s->swap_blocks_used), LLU(s->swap_blocks_total), LLU(s->swap_failures));
}

void get_stats(worker *w) {
    engine_slot *e = any_engine(w);
    pllm_stats stats;
    out_struct out = any_out_struct(w, 128, sizeof stats);
    int32_t code = TRY(pllm_engine_get_stats, e->engine, out.at);
    EXPECT(e->engine ? !code == has_valid_size(&out) : code == PLLM_E_INVALID_ARGUMENT,
           "get_stats: code %d", code);
    if (!check_out_struct(&out, code, &stats)) return;
    w->hash = mix_bytes(w->hash, &stats, sizeof stats);
    check_stats(e, &stats);
}

void step_engine(worker *w) {
    engine_slot *e = any_engine(w);
    for (unsigned times = 1 + below(w, 4); times > 0; times--) {
        pllm_step step;
        w->buffers = 0;
        out_struct out = any_out_struct(w, 40, sizeof step);
        int32_t code = TRY(pllm_engine_step, e->engine, out.at);
        bool must_succeed = e->engine && has_valid_size(&out) && !program.racing;
        EXPECT(!must_succeed || code == (e->started ? PLLM_E_BUSY : 0), "step failed with %d",
               code);
        if (check_out_struct(&out, code, &step)) w->hash = mix_bytes(w->hash, &step, sizeof step);
    }
}

void start_engine(worker *w) {
    engine_slot *e = any_engine(w);
    if (!program.may_start && e->engine) return;
    int32_t code = TRY(pllm_engine_start, e->engine);
    if (!e->engine || program.racing) return;
    EXPECT(code == (e->started ? PLLM_E_BUSY : 0), "start failed with %d", code);
    e->started = true;
}

void stop_engine(worker *w) {
    engine_slot *e = any_engine(w);
    int32_t code = TRY(pllm_engine_stop, e->engine);
    EXPECT(!code == !!e->engine, "stop failed with %d", code);
    if (e->engine && !program.racing) e->started = false;
}

void stop_unconditionally(worker *w, engine_slot *e) {
    EXPECT(TRY(pllm_engine_stop, e->engine) == 0, "stop failed");
    e->started = false;
}
