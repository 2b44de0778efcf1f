// Sequences: fork, append, rewind, resume, export, import and free; and pinned prompts.
#include <thread>

#include "support.hpp"

// Forks into the engine's queue, because the queue of generate() is freed.
static pagedllm::Sequence fork_of(const pagedllm::Sequence &parent, pagedllm::Engine &engine,
                                  std::optional<uint64_t> at = std::nullopt) {
    const pagedllm::QueueView queue = engine.queue();
    pagedllm::Fork how;
    how.at = at;
    how.queue = &queue;
    return parent.fork(how).value();
}

// Generates this number of greedy tokens, or any number.
static pagedllm::Resume more(std::optional<uint32_t> tokens) {
    pagedllm::Resume how;
    how.sampling.temperature = 0;
    how.sampling.logprobs = true;
    how.sampling.max_tokens = tokens;
    return how;
}

// Generates up to max_model_len.
static pagedllm::Resume endlessly() {
    pagedllm::Resume how = more(std::nullopt);
    how.sampling.ignore_eos = true;
    return how;
}

// Continues as if the sequence had never been idle.
static pagedllm::Resume continued() {
    pagedllm::Resume how;
    how.continue_generation = true;
    return how;
}

// An engine, and an answer of 11 tokens to a prompt of 16 tokens.
class Sequences : public testing::Test {
protected:
    pagedllm::Sequence keep(uint32_t tokens) { return engine.sequence(generate(tokens).sequence); }

    pagedllm::Completion generate(uint32_t tokens) {
        pagedllm::Request request = greedy(prompt);
        request.keep = true;
        request.sampling.logprobs = true;
        request.sampling.max_tokens = tokens;
        return engine.generate(request).value();
    }

    // Requires the tokens of the answer from a position on, with the same bits.
    void expect_rest(pagedllm::Sequence &sequence, uint64_t from) {
        const pagedllm::Completion rest = sequence.generate(more(static_cast<uint32_t>(27 - from))).value();
        const auto begin = static_cast<std::ptrdiff_t>(from - 16);
        EXPECT_EQ(rest.tokens, std::vector<uint32_t>(whole.tokens.begin() + begin, whole.tokens.end()));
        EXPECT_EQ(rest.logprobs, std::vector<float>(whole.logprobs.begin() + begin, whole.logprobs.end()));
    }

    const std::string prompt = chat(france.question);
    pagedllm::Engine engine = open_engine();
    const pagedllm::Completion whole = generate(11);
};

TEST_F(Sequences, continue_in_forks_with_the_same_tokens) {
    pagedllm::Sequence parent = keep(4), child = fork_of(parent, engine);
    EXPECT_NE(child.id(), parent.id());
    EXPECT_EQ(child.info().value().len, 20u);
    EXPECT_EQ(child.info().value().idle, 1u);
    expect_rest(child, 20);
    expect_rest(parent, 20);
    EXPECT_EQ(parent.info().value().len, 27u);
}

TEST_F(Sequences, fork_at_an_earlier_position) {
    const pagedllm::Sequence parent = engine.sequence(whole.sequence);
    for (const uint64_t at : {16u, 17u, 22u}) {
        pagedllm::Sequence child = fork_of(parent, engine, at);
        expect_rest(child, at);
    }
    pagedllm::Sequence early = fork_of(parent, engine, 3);
    EXPECT_EQ(early.generate(more(2)).value().prompt_tokens, 3u);
    EXPECT_EQ(parent.info().value().len, 27u);
}

TEST_F(Sequences, compute_only_appended_tokens) {
    pagedllm::Sequence sequence = engine.sequence(whole.sequence);
    const auto turn = engine.tokenize("<|user|>\n"s + cow.question + "<|end|>\n<|assistant|>\n", false).value();
    const uint64_t before = engine.stats().value().prompt_tokens;
    EXPECT_TRUE(ok(sequence.append(turn)));
    EXPECT_EQ(sequence.generate(more(std::nullopt)).value().text, cow.answer);
    // The last token of a turn is sampled, but computed only in the next turn.
    const uint64_t computed = engine.stats().value().prompt_tokens - before;
    EXPECT_TRUE(computed == turn.size() || computed == turn.size() + 1) << computed << " of " << turn.size();
}

TEST_F(Sequences, generate_the_same_tokens_after_a_rewind) {
    pagedllm::Sequence sequence = engine.sequence(whole.sequence);
    for (const uint64_t len : {26u, 20u, 16u}) {
        EXPECT_TRUE(ok(sequence.rewind(len)));
        EXPECT_EQ(sequence.info().value().len, len);
        expect_rest(sequence, len);
    }
}

TEST_F(Sequences, can_be_streamed_and_are_idle_after_the_stream_is_destroyed) {
    pagedllm::Sequence sequence = keep(2);
    {
        pagedllm::Stream stream = sequence.stream(endlessly()).value();
        for (int i = 0; i < 3; i++) {
            const auto output = stream.next();
            ASSERT_TRUE(output.has_value());
            EXPECT_EQ(output->sequence, sequence.id());
        }
        EXPECT_TRUE(fails(Code::invalid_argument, sequence.resume(more(1), engine.queue())));  // the sequence is running
        EXPECT_TRUE(fails(Code::invalid_argument, sequence.generate(more(1))));
    }
    EXPECT_TRUE(eventually([&] { return sequence.info().value().idle == 1; }));
    EXPECT_EQ(sequence.generate(more(1)).value().tokens.size(), 1u);
    pagedllm::Resume last_turn = endlessly();
    last_turn.keep = false;
    (void)sequence.stream(last_turn).value().next();
    EXPECT_TRUE(eventually([&] { return !sequence.info().ok(); }));
    EXPECT_TRUE(fails(Code::not_found, sequence.free()));
}

TEST_F(Sequences, write_to_the_given_queue) {
    pagedllm::Sequence sequence = keep(2);
    const pagedllm::Queue queue = engine.create_queue(64).value();
    pagedllm::Resume how = more(3);
    how.user_data = 11;
    EXPECT_TRUE(fails(Code::invalid_argument, sequence.resume(how)));  // the queue of generate() is freed
    EXPECT_TRUE(ok(sequence.resume(how, queue)));
    EXPECT_EQ(read_to_the_end(queue).tokens.size(), 3u);
    EXPECT_TRUE(ok(sequence.resume(how)));
    EXPECT_EQ(read_to_the_end(queue).tokens.size(), 3u);
}

TEST_F(Sequences, are_freed_by_their_owner) {
    EXPECT_TRUE(ok(engine.sequence(whole.sequence).free()));
    EXPECT_TRUE(fails(Code::not_found, engine.sequence(whole.sequence).free()));
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));

    pagedllm::Sequence first = keep(2), second = std::move(first);
    const uint64_t id = second.id();
    EXPECT_TRUE(fails(Code::invalid_argument, first.info()));
    EXPECT_TRUE(fails(Code::invalid_argument, first.fork()));
    EXPECT_TRUE(fails(Code::invalid_argument, first.append(whole.tokens)));
    EXPECT_TRUE(fails(Code::invalid_argument, first.rewind(1)));
    EXPECT_TRUE(fails(Code::invalid_argument, first.resume()));
    EXPECT_TRUE(fails(Code::invalid_argument, first.stream()));
    EXPECT_TRUE(fails(Code::invalid_argument, first.generate()));
    EXPECT_TRUE(fails(Code::invalid_argument, first.export_state()));
    EXPECT_TRUE(fails(Code::invalid_argument, first.export_to(engine.queue())));
    EXPECT_TRUE(fails(Code::invalid_argument, first.free()));
    first = std::move(second);
    EXPECT_EQ(first.release(), id);
    EXPECT_EQ(engine.stats().value().idle, 1u);
    EXPECT_TRUE(fails(Code::invalid_argument, first.info()));
    first = engine.sequence(id);
    first = fork_of(first, engine);  // frees the previous sequence
    EXPECT_TRUE(fails(Code::not_found, engine.sequence(id).info()));
    { const pagedllm::Sequence last = std::move(first); }
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));
}

TEST_F(Sequences, end_when_they_are_freed_while_they_run) {
    pagedllm::Stream stream = engine.stream(endless(prompt)).value();
    pagedllm::Sequence sequence = engine.sequence(stream.next()->sequence);
    EXPECT_TRUE(ok(sequence.free()));
    EXPECT_EQ(stream.collect().value().finish_reason, FinishReason::abort);
}

TEST_F(Sequences, can_outlive_their_engine) {
    pagedllm::Sequence sequence = engine.sequence(whole.sequence), never_touched = keep(2);
    pagedllm::Pin pin = engine.pin({prompt}).value();
    const auto state = sequence.export_state().value();
    const pagedllm::Queue queue = engine.create_queue(4).value();
    { const pagedllm::Engine freed = std::move(engine); }
    EXPECT_TRUE(fails(Code::invalid_argument, engine.import_sequence(state)));
    EXPECT_TRUE(fails(Code::closed, sequence.export_state()));
    EXPECT_TRUE(fails(Code::closed, sequence.export_to(queue)));
    EXPECT_TRUE(fails(Code::closed, sequence.info()));
    EXPECT_TRUE(fails(Code::closed, sequence.fork()));
    EXPECT_TRUE(fails(Code::closed, sequence.append(whole.tokens)));
    EXPECT_TRUE(fails(Code::closed, sequence.stream()));
    EXPECT_TRUE(fails(Code::closed, sequence.free()));
    EXPECT_TRUE(fails(Code::closed, pin.unpin()));
}

TEST_F(Sequences, refuse_invalid_arguments) {
    pagedllm::Sequence sequence = keep(4), unknown = engine.sequence(uint64_t(1) << 40);
    const pagedllm::QueueView queue = engine.queue();
    const std::vector<uint32_t> beyond = {1024}, many(5000, 1);
    pagedllm::Fork how;
    how.queue = &queue;
    EXPECT_TRUE(fails(Code::invalid_argument, sequence.fork_many(0, how)));
    EXPECT_TRUE(fails(Code::capacity, sequence.fork_many(1 << 20, how)));
    for (const uint64_t at : {uint64_t(0), uint64_t(21), UINT64_MAX - 1}) {
        how.at = at;
        EXPECT_TRUE(fails(Code::invalid_argument, sequence.fork(how)));
        EXPECT_TRUE(fails(Code::invalid_argument, sequence.rewind(at)));
    }
    const auto state = sequence.export_state().value();
    pagedllm::Engine other = open_engine();
    pagedllm::Queue others = other.create_queue(4).value(), moved = std::move(others);
    for (const pagedllm::Queue *wrong : {&moved, &others}) {
        how = {};
        how.queue = wrong;
        EXPECT_TRUE(fails(Code::invalid_argument, sequence.fork(how)));
        EXPECT_TRUE(fails(Code::invalid_argument, sequence.resume(more(1), *wrong)));
        EXPECT_TRUE(fails(Code::invalid_argument, sequence.resume(continued(), *wrong)));
        EXPECT_TRUE(fails(Code::invalid_argument, sequence.export_to(*wrong)));
        EXPECT_TRUE(fails(Code::invalid_argument, engine.import_sequence(state, *wrong)));
    }
    EXPECT_TRUE(fails(Code::invalid_argument, sequence.append(beyond)));
    EXPECT_TRUE(fails(Code::invalid_argument, sequence.append(many)));
    pagedllm::Resume bad = more(1);
    bad.sampling.temperature = -1;
    EXPECT_TRUE(fails(Code::invalid_argument, sequence.generate(bad)));
    bad = more(1);
    bad.sampling.grammar = pagedllm::Grammar::json_schema("nonsense");
    EXPECT_TRUE(fails(Code::invalid_argument, sequence.generate(bad)));
    EXPECT_TRUE(fails(Code::not_found, unknown.info()));
    EXPECT_TRUE(fails(Code::not_found, unknown.fork()));
    EXPECT_TRUE(fails(Code::not_found, unknown.append(whole.tokens)));
    EXPECT_TRUE(fails(Code::not_found, unknown.rewind(1)));
    EXPECT_TRUE(fails(Code::not_found, unknown.resume(more(1), queue)));
    EXPECT_TRUE(fails(Code::not_found, unknown.generate()));
    EXPECT_TRUE(fails(Code::not_found, unknown.resume(continued(), queue)));
    EXPECT_TRUE(fails(Code::not_found, unknown.export_state()));
    EXPECT_TRUE(fails(Code::not_found, unknown.export_to(queue)));
    EXPECT_TRUE(fails(Code::invalid_argument, sequence.resume(continued())));  // the queue of generate() is freed
    EXPECT_TRUE(fails(Code::not_found, unknown.free()));
    EXPECT_TRUE(fails(Code::not_found, engine.sequence(0).free()));
    expect_rest(sequence, 20);
}

TEST_F(Sequences, can_be_forked_from_sixteen_threads) {
    const pagedllm::Sequence trunk = keep(4);
    std::vector<std::thread> threads;
    for (int i = 0; i < 16; i++) {
        threads.emplace_back([&] {
            for (int j = 0; j < 3; j++) {
                pagedllm::Sequence branch = fork_of(trunk, engine);
                expect_rest(branch, 20);
            }
        });
    }
    for (std::thread &thread : threads) thread.join();
    EXPECT_TRUE(eventually([&] { return engine.stats().value().idle == 2; }));  // the trunk and the whole answer
}

// A request with a seed.
static pagedllm::Request drawing(uint32_t tokens) {
    pagedllm::Request request{"Once upon"};
    request.sampling.temperature = 1.5f;
    request.sampling.seed = 7;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = tokens;
    return request;
}

static std::vector<uint32_t> tokens_of(const pagedllm::Outputs &outputs, uint64_t sequence) {
    std::vector<uint32_t> tokens;
    for (const pagedllm::Output &output : outputs)
        if (output.sequence == sequence) tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
    return tokens;
}

TEST(RunningSequences, have_running_forks_that_differ_only_with_a_seed) {
    pagedllm::Engine engine = host_stepped_engine();
    const pagedllm::Sequence parent = engine.sequence(engine.add(drawing(20)).value());
    for (int i = 0; i < 5; i++) engine.step().value();
    pagedllm::Fork seeded;
    seeded.seed = 9;
    const auto alike = parent.fork_many(2).value(), apart = parent.fork_many(2, seeded).value();
    step_to_the_end(engine);
    const pagedllm::Outputs outputs = engine.queue().poll().value();
    const auto whole = tokens_of(outputs, parent.id());
    ASSERT_EQ(whole.size(), 20u);
    const std::vector<uint32_t> rest(whole.begin() + 5, whole.end());
    for (const pagedllm::Sequence &child : alike) EXPECT_EQ(tokens_of(outputs, child.id()), rest);
    const auto a = tokens_of(outputs, apart[0].id()), b = tokens_of(outputs, apart[1].id());
    EXPECT_EQ(a.size(), 15u);
    EXPECT_EQ(b.size(), 15u);
    EXPECT_TRUE(a != b && a != rest && b != rest);
}

TEST(RunningSequences, can_be_rewound_with_their_random_numbers) {
    pagedllm::Engine engine = host_stepped_engine();
    pagedllm::Sequence sequence = engine.sequence(engine.add(drawing(12)).value());
    for (int i = 0; i < 8; i++) engine.step().value();
    EXPECT_TRUE(ok(sequence.rewind(sequence.info().value().len - 5)));
    step_to_the_end(engine);
    const auto tokens = tokens_of(engine.queue().poll().value(), sequence.id());
    ASSERT_EQ(tokens.size(), 17u);
    EXPECT_TRUE(std::equal(tokens.begin() + 3, tokens.begin() + 8, tokens.begin() + 8));
}

// Releases the parent, because its stream still reads it.
static pagedllm::Sequence fork_of_running(pagedllm::Engine &engine, uint64_t id) {
    pagedllm::Sequence parent = engine.sequence(id);
    pagedllm::Sequence child = parent.fork().value();
    parent.release();
    return child;
}

TEST(RunningSequences, have_forks_in_the_stream_of_their_request) {
    pagedllm::Engine engine = open_engine();
    pagedllm::Stream stream = engine.stream(drawing(50), 4).value();
    std::optional<pagedllm::Sequence> child;
    uint64_t from_child = 0;
    for (const pagedllm::Output &output : stream) {
        if (!child) child = fork_of_running(engine, output.sequence);
        from_child += output.request == child->id();
    }
    EXPECT_GT(from_child, 0u);
}

static const uint64_t drawn = 40;

// Requires that `tail` has this number of tokens, the last of `whole`.
static void expect_tail(const std::vector<uint32_t> &tail, uint64_t tokens, const std::vector<uint32_t> &whole) {
    ASSERT_EQ(whole.size(), drawn);
    ASSERT_EQ(tail.size(), tokens);
    EXPECT_TRUE(std::equal(tail.begin(), tail.end(), whole.end() - static_cast<std::ptrdiff_t>(tail.size())));
}

TEST(ExportedSequences, continue_with_the_same_tokens) {
    pagedllm::Engine from = open_engine(), to = open_engine();
    pagedllm::Stream stream = from.stream(drawing(drawn), 4).value();  // pauses after 4 unread outputs
    const pagedllm::Output first = *stream.next();
    std::vector<uint32_t> whole(first.tokens.begin(), first.tokens.end());
    const uint64_t prompt = first.prompt_tokens;
    pagedllm::Sequence running = from.sequence(first.sequence);
    const auto state = running.export_state().value();
    running.release();  // the stream still reads the sequence
    const pagedllm::Completion rest = stream.collect().value();
    whole.insert(whole.end(), rest.tokens.begin(), rest.tokens.end());

    const pagedllm::Queue queue = to.create_queue(1).value();  // pauses after one unread output
    pagedllm::Sequence moved = to.import_sequence(state, queue).value();
    const pagedllm::SequenceInfo info = moved.info().value();
    EXPECT_EQ(info.idle, 1u);
    EXPECT_EQ(info.inexact, 0u);
    const uint64_t generated = info.len - prompt;
    EXPECT_TRUE(generated > 0 && generated < 20) << generated;
    EXPECT_TRUE(ok(moved.resume(continued())));
    EXPECT_TRUE(fails(Code::invalid_argument, moved.resume(continued())));  // the sequence is running
    expect_tail(read_to_the_end(queue).tokens, drawn - generated, whole);
    EXPECT_LE(to.stats().value().prompt_tokens, 1u);
    EXPECT_EQ(moved.info().value().len, prompt + drawn);
    EXPECT_EQ(moved.generate(more(2)).value().tokens.size(), 2u);
}

// The state of a sequence after this number of tokens.
static std::vector<uint8_t> exported_after(uint64_t tokens, pagedllm::Engine &from, const pagedllm::Request &request) {
    pagedllm::Sequence sequence = from.sequence(from.add(request).value());
    for (uint64_t i = 0; i < tokens; i++) from.step().value();
    const pagedllm::Queue queue = from.create_queue(1).value();
    EXPECT_TRUE(ok(sequence.export_to(queue)));
    sequence.release();
    step_to_the_end(from);
    const pagedllm::Outputs outputs = queue.poll().value();
    EXPECT_EQ(outputs.size(), 1u);
    return {outputs[0].sequence_state.begin(), outputs[0].sequence_state.end()};
}

TEST(ExportedSequences, continue_in_a_stream_or_queue_with_new_user_data) {
    pagedllm::Engine from = host_stepped_engine(), to = open_engine();
    const auto state = exported_after(8, from, drawing(drawn));
    const auto whole = read_to_the_end(from.queue()).tokens;
    pagedllm::Resume how = continued();
    how.keep = false;
    how.user_data = 11;
    how.sampling.max_tokens = 1;  // has no effect with continue_generation

    pagedllm::Sequence streamed = to.import_sequence(state).value();
    std::vector<uint32_t> tail;
    for (const pagedllm::Output &output : streamed.stream(how).value()) {
        EXPECT_EQ(output.sequence, streamed.id());
        EXPECT_EQ(output.user_data, 11u);
        tail.insert(tail.end(), output.tokens.begin(), output.tokens.end());
    }
    expect_tail(tail, drawn - 8, whole);
    EXPECT_TRUE(fails(Code::not_found, streamed.free()));

    const pagedllm::Queue queue = to.create_queue(64).value();
    pagedllm::Sequence queued = to.import_sequence(state).value();
    EXPECT_TRUE(ok(queued.resume(how, queue)));
    expect_tail(read_to_the_end(queue).tokens, drawn - 8, whole);
}

TEST(ExportedSequences, keep_their_output_kind) {
    pagedllm::Engine from = host_stepped_engine(), to = open_engine();
    pagedllm::Request request = drawing(drawn);
    request.sampling.output_kind = pagedllm::OutputKind::cumulative;
    const auto state = exported_after(8, from, request);
    pagedllm::Resume how = continued();
    how.sampling.output_kind = request.sampling.output_kind;
    const pagedllm::Completion all = to.import_sequence(state)->generate(how).value();
    const pagedllm::Outputs outputs = from.queue().poll().value();
    const pagedllm::Output whole = outputs[outputs.size() - 1];
    EXPECT_EQ(all.tokens, std::vector<uint32_t>(whole.tokens.begin(), whole.tokens.end()));
    EXPECT_EQ(all.text, whole.text);
}

TEST(ExportedSequences, can_arrive_in_the_queue_of_their_text) {
    pagedllm::Engine from = host_stepped_engine(), to = open_engine();
    const pagedllm::Sequence running = from.sequence(from.add(drawing(drawn)).value());
    for (int i = 0; i < 8; i++) from.step().value();
    EXPECT_TRUE(ok(running.export_to(from.queue())));
    step_to_the_end(from);
    const pagedllm::Outputs outputs = from.queue().poll().value();
    pagedllm::Sequence moved = to.sequence(0);
    int states = 0;
    for (const pagedllm::Output &output : outputs) {
        if (output.sequence_state.empty()) continue;
        states++;
        EXPECT_EQ(output.sequence, running.id());
        EXPECT_TRUE(output.tokens.empty() && output.text.empty() && !output.is_last());
        moved = to.import_sequence(output.sequence_state).value();
    }
    ASSERT_EQ(states, 1);
    expect_tail(moved.generate(continued()).value().tokens, drawn - 8, tokens_of(outputs, running.id()));
}

TEST(ExportedSequences, report_an_error_if_they_ended_before_the_step) {
    pagedllm::Engine engine = host_stepped_engine();
    const uint64_t request = engine.add(drawing(drawn)).value();
    const pagedllm::Sequence sequence = engine.sequence(request);
    for (int i = 0; i < 5; i++) engine.step().value();
    const pagedllm::Queue queue = engine.create_queue(4).value();
    EXPECT_TRUE(ok(engine.abort(request)));
    EXPECT_TRUE(ok(sequence.export_to(queue)));
    auto waiting = std::async(std::launch::async, [&] { return sequence.export_state(); });
    while (waiting.wait_for(1ms) != std::future_status::ready) engine.step().value();
    EXPECT_TRUE(fails(Code::not_found, waiting.get()));
    const pagedllm::Outputs outputs = queue.poll().value();
    ASSERT_EQ(outputs.size(), 1u);
    EXPECT_EQ(outputs[0].error_code, Code::not_found);
    EXPECT_FALSE(outputs[0].error_message.empty());
    EXPECT_EQ(outputs[0].sequence, sequence.id());
    EXPECT_TRUE(outputs[0].sequence_state.empty() && !outputs[0].is_last());
}

TEST(ExportedSequences, do_not_change_a_completion) {
    pagedllm::Completion all;
    pllm_output record{};
    record.struct_size = sizeof record;
    record.text = "hello world";
    record.text_len = 11;
    all.add(pagedllm::Output(record), pagedllm::OutputKind::cumulative);
    const uint8_t state[1] = {};
    record.text = nullptr;
    record.text_len = 0;
    record.sequence_state = state;
    record.sequence_state_len = 1;
    all.add(pagedllm::Output(record), pagedllm::OutputKind::cumulative);
    EXPECT_EQ(all.text, "hello world");
    record.struct_size = offsetof(pllm_output, sequence_state);  // as of a library without this field
    EXPECT_TRUE(pagedllm::Output(record).sequence_state.empty());
}

TEST_F(Sequences, are_inexact_on_another_instruction_path) {
    pagedllm::Options options = light_options();
    options.isa = pagedllm::Isa::portable;
    pagedllm::Engine other = pagedllm::Engine::create(options).value();
    const pagedllm::Sequence moved = other.import_sequence(keep(4).export_state().value()).value();
    EXPECT_EQ(moved.info().value().inexact != 0, engine.model_info()->isa != "portable");
}

TEST_F(Sequences, are_not_imported_from_a_damaged_state) {
    pagedllm::Sequence sequence = keep(4);
    const std::vector<uint8_t> state = sequence.export_state().value();
    for (const size_t size : {size_t(0), size_t(1), size_t(40), state.size() / 2, state.size() - 1})
        EXPECT_TRUE(fails(Code::invalid_argument, engine.import_sequence({state.data(), size}))) << size;
    EXPECT_TRUE(fails(Code::invalid_argument, engine.import_sequence({})));
    for (const size_t place : {size_t(0), size_t(40), state.size() / 2, state.size() - 1}) {
        std::vector<uint8_t> bent = state;
        bent[place] ^= 4;
        EXPECT_TRUE(fails(Code::invalid_argument, engine.import_sequence(bent))) << place;
    }
    std::vector<uint8_t> newer = state;
    newer[8]++;
    EXPECT_TRUE(fails(Code::unsupported, engine.import_sequence(newer)));
    pagedllm::Options options = light_options();
    options.block_size = 32;
    EXPECT_TRUE(fails(Code::invalid_argument, pagedllm::Engine::create(options)->import_sequence(state)));
    pagedllm::Sequence moved = engine.import_sequence(state).value();
    expect_rest(moved, 20);
    expect_rest(sequence, 20);
}

TEST(Pin, computes_a_prompt_before_the_first_request) {
    pagedllm::Engine engine = open_engine();
    std::string prompt;
    for (int i = 0; i < 100; i++) prompt += "long ";
    pagedllm::Request request{prompt};
    request.sampling.max_tokens = 1;
    const auto hits = [&](std::string_view salt) {
        const uint64_t before = engine.stats().value().prefix_hits;
        request.cache_salt = salt;
        engine.generate(request).value();
        return engine.stats().value().prefix_hits - before;
    };
    pagedllm::Pin first = engine.pin({prompt}).value();
    ASSERT_TRUE(eventually([&] { return engine.stats().value().prompt_tokens > 100; }));
    EXPECT_GT(hits(""), 100u);
    EXPECT_EQ(hits("a\0b"sv), 0u);
    EXPECT_GT(hits("a\0b"sv), 100u);
    pagedllm::Pin second = std::move(first);
    EXPECT_TRUE(fails(Code::invalid_argument, first.unpin()));
    EXPECT_TRUE(ok(second.unpin()));
    EXPECT_TRUE(fails(Code::invalid_argument, second.unpin()));
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));
    {
        const pagedllm::Pin held = engine.pin({prompt}).value();
        EXPECT_TRUE(eventually([&] { return engine.stats().value().blocks_used > 0; }));
    }
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));
    pagedllm::Prefix brief{prompt};
    brief.time_to_live = 1ms;
    engine.pin(brief).value().release();
    std::this_thread::sleep_for(2ms);
    engine.generate(request).value();  // a step finds the pin expired
    EXPECT_TRUE(eventually([&] { return is_idle(engine); }));
}
