// ---- options and requests -----------------------------------------------------------------------

// Data type of KV blocks.
//: enum Dtype

// Instruction path.
//: enum Isa

// Format of the weights in memory.
//: enum Weights

// Treatment of preempted requests.
//: enum Preemption

// Order of the waiting requests.
//: enum Order

// Composition of a step.
//: enum Batching

// Number of blocks that a request needs to start.
//: enum Allocation

//: doc Options
struct Options {
    //: fields Options
};

// Content of the outputs.
//: enum OutputKind

// Kind of a constraint on the output.
//: enum GrammarKind

// A constraint on the output. Default: none.
//
//     sampling.grammar = pagedllm::Grammar::regex("[0-9]+");
struct Grammar {
    GrammarKind kind = GrammarKind::none;
    std::string text = {};                  // the schema, regular expression or Lark grammar
    std::vector<std::string> choices = {};  // the allowed texts if kind is choice

    static Grammar json_schema(std::string schema) { return {GrammarKind::json_schema, std::move(schema)}; }
    static Grammar json_object() { return {GrammarKind::json_object}; }
    static Grammar regex(std::string expression) { return {GrammarKind::regex, std::move(expression)}; }
    static Grammar choice(std::vector<std::string> of) { return {GrammarKind::choice, {}, std::move(of)}; }
    static Grammar lark(std::string grammar) { return {GrammarKind::lark, std::move(grammar)}; }
};

//: doc Dry
struct Dry {
    //: fields Dry
};

//: alias LogitBias

//: doc Sampling
struct Sampling {
    //: fields Sampling
};

// When a beam search stops.
//: enum EarlyStopping

//: doc Beam
struct Beam {
    //: fields Beam
};

// Edits the logits of the next token of a sequence, on the stepping thread. A lambda without
// captures converts to it. pllm_logits_hook lists the functions that it may call.
using LogitsHook = void (*)(void *hook_data, uint64_t sequence, const uint32_t *tokens, uint64_t tokens_len, float *logits,
                            uint64_t vocab_size) noexcept;

// A view of a prompt: text or token ids.
using Prompt = std::variant<std::string_view, Span<const uint32_t>>;

//: doc Request
// Initialize it as `{"text"}` or `{tokens, sampling}`, or set its fields.
struct Request {
    //: fields Request
};

class QueueView;

//: doc Fork
struct Fork {
    //: fields Fork
};

//: doc Resume
struct Resume {
    //: fields Resume
};

//: doc Prefix
// Initialize it as `{"text"}`, or set its fields.
struct Prefix {
    //: fields Prefix
};
