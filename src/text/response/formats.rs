//! The table of formats in which families of models write reasoning and tool calls.

/// How a family marks its reasoning.
#[derive(Debug)]
pub struct Think {
    pub open: &'static [&'static str],
    pub close: &'static [&'static str],
    /// The reasoning has begun before the first token, even if the prompt does not show it.
    pub always_open: bool,
}

/// How a family writes its tool calls.
#[derive(Debug)]
pub struct Format {
    /// Name of the format.
    pub name: &'static str,
    /// Other names of the format.
    pub aliases: &'static [&'static str],
    /// Markers of the reasoning.
    pub think: Option<&'static Think>,
    /// Markers that begin a section of calls and are dropped.
    pub section: &'static [&'static str],
    /// Markers that begin one call, or a list of calls.
    pub begin: &'static [&'static str],
    /// Markers that end a call or a section and are dropped.
    pub end: &'static [&'static str],
    /// Markers of turns, dropped everywhere.
    pub drop: &'static [&'static str],
    /// Syntax of a call after its marker.
    pub body: Body,
    /// Content that begins like a call is one, without a marker.
    pub bare: bool,
    /// All of these strings in a chat template identify the family.
    pub template: &'static [&'static str],
}

/// The syntax of a call after its marker.
#[derive(Debug)]
pub enum Body {
    /// The family has no tool calls.
    None,
    /// An object with the name and the arguments, or a list of objects.
    Json,
    /// A list of calls in the syntax of Python.
    Python,
    /// Name and parameters between tags.
    Tagged(Tags),
    /// A name, a marker, and the arguments as a JSON object.
    Named(Named),
    /// Messages with a channel and a recipient.
    Harmony,
}

/// Tags around the parts of a call. A call is
/// `name_open name name_close (key_open key key_close value_open value value_close)* end`.
#[derive(Debug)]
pub struct Tags {
    pub name_open: &'static str,
    /// Any of these ends the name. The next part can begin with it.
    pub name_close: &'static [&'static str],
    pub key_open: &'static str,
    pub key_close: &'static str,
    /// Empty: the value follows the key.
    pub value_open: &'static str,
    pub value_close: &'static str,
    /// Ends the call.
    pub end: &'static str,
    /// A value has a line of its own: one newline at each end belongs to the format.
    pub lines: bool,
}

/// A call as a name and a JSON object.
#[derive(Debug)]
pub struct Named {
    /// Markers between the name and the arguments.
    pub arguments: &'static [&'static str],
    /// Marker between the name and an id.
    pub id: &'static [&'static str],
    /// `{` ends the name, too, and `[` in place of a name begins a list of JSON objects.
    pub brace: bool,
    /// The header is an id: `functions.NAME:INDEX`.
    pub name_in_id: bool,
}

const TAGS: Think = Think { open: &["<think>"], close: &["</think>"], always_open: false };
const OPEN_TAGS: Think = Think { always_open: true, ..TAGS };
const BRACKETS: Think = Think { open: &["[THINK]"], close: &["[/THINK]"], always_open: false };
const COMMAND: Think = Think { open: &["<|START_THINKING|>"], close: &["<|END_THINKING|>"], always_open: false };
const GRANITE: Think = Think {
    open: &["<think>", "Here is my thought process:", "Here's my thought process:"],
    close: &["</think>", "Here is my response:", "Here's my response:"],
    always_open: false,
};

const HERMES: Format = Format {
    name: "hermes",
    aliases: &["qwen", "qwen2_5", "qwen3", "qwen3_json", "granite4"],
    think: Some(&TAGS),
    section: &[],
    begin: &["<tool_call>"],
    end: &["</tool_call>"],
    drop: &["<|im_end|>"],
    body: Body::Json,
    bare: false,
    template: &["<tool_call>", "</tool_call>"],
};

const DEEPSEEK: Format = Format {
    name: "deepseek_v3",
    aliases: &["deepseek_v31", "deepseek"],
    section: &["<｜tool▁calls▁begin｜>"],
    begin: &["<｜tool▁call▁begin｜>"],
    end: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    drop: &["<｜end▁of▁sentence｜>"],
    body: Body::Named(Named { arguments: &["<｜tool▁sep｜>"], id: &[], brace: false, name_in_id: false }),
    template: &["<｜tool▁calls▁begin｜>"],
    ..HERMES
};

/// All formats. For the detection, a format precedes those whose strings are a part of its own.
pub const FORMATS: &[Format] = &[
    Format {
        name: "harmony",
        aliases: &["gpt_oss", "openai"],
        think: None,
        begin: &[],
        end: &["<|end|>", "<|call|>", "<|return|>"],
        drop: &[],
        body: Body::Harmony,
        template: &["<|channel|>", "<|message|>"],
        ..HERMES
    },
    Format {
        name: "qwen3_coder",
        aliases: &["qwen3_xml", "nemotron_v3"],
        begin: &["<tool_call>", "<function="],
        body: Body::Tagged(Tags {
            name_open: "<function=",
            name_close: &[">"],
            key_open: "<parameter=",
            key_close: ">",
            value_open: "",
            value_close: "</parameter>",
            end: "</function>",
            lines: true,
        }),
        template: &["<function=", "<parameter="],
        ..HERMES
    },
    Format {
        name: "glm45",
        aliases: &["glm47", "glm"],
        drop: &["<|user|>", "<|observation|>", "<|endoftext|>"],
        body: Body::Tagged(Tags {
            name_open: "",
            name_close: &["\n", "<arg_key>", "</tool_call>"],
            key_open: "<arg_key>",
            key_close: "</arg_key>",
            value_open: "<arg_value>",
            value_close: "</arg_value>",
            end: "</tool_call>",
            lines: false,
        }),
        template: &["<arg_key>", "<arg_value>"],
        ..HERMES
    },
    Format {
        name: "kimi_k2",
        aliases: &["kimi"],
        section: &["<|tool_calls_section_begin|>"],
        begin: &["<|tool_call_begin|>"],
        end: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        body: Body::Named(Named { arguments: &["<|tool_call_argument_begin|>"], id: &[], brace: false, name_in_id: true }),
        template: &["<|tool_calls_section_begin|>"],
        ..HERMES
    },
    Format {
        name: "deepseek_r1",
        aliases: &[],
        think: Some(&OPEN_TAGS),
        template: &["<｜tool▁calls▁begin｜>", "<think>\\n'}}"],
        ..DEEPSEEK
    },
    DEEPSEEK,
    Format {
        name: "command_r",
        aliases: &["command_r7b", "command_a", "cohere", "cohere_command3"],
        think: Some(&COMMAND),
        begin: &["<|START_ACTION|>", "Action: ```json"],
        end: &["<|END_ACTION|>", "```"],
        drop: &["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"],
        template: &["<|START_OF_TURN_TOKEN|>"],
        ..HERMES
    },
    Format {
        name: "mistral",
        aliases: &["mistral_old", "mistral_args", "ministral", "magistral"],
        think: Some(&BRACKETS),
        begin: &["[TOOL_CALLS]"],
        end: &[],
        drop: &["</s>"],
        body: Body::Named(Named { arguments: &["[ARGS]"], id: &["[CALL_ID]"], brace: true, name_in_id: false }),
        template: &["[TOOL_CALLS]"],
        ..HERMES
    },
    Format {
        name: "nemotron",
        aliases: &["llama_nemotron"],
        begin: &["<TOOLCALL>"],
        end: &["</TOOLCALL>"],
        drop: &["<|eot_id|>"],
        template: &["<TOOLCALL>"],
        ..HERMES
    },
    Format {
        name: "granite",
        aliases: &["granite3"],
        think: Some(&GRANITE),
        begin: &["<|tool_call|>", "<tool_call>"],
        end: &["</tool_call>"],
        drop: &["<|end_of_text|>"],
        template: &["<|start_of_role|>", "<|tool_call|>"],
        ..HERMES
    },
    Format {
        name: "phi4_mini",
        aliases: &["phi4_mini_json"],
        begin: &["functools", "<|tool_call|>"],
        end: &["<|/tool_call|>"],
        drop: &["<|end|>"],
        template: &["<|tool|>", "<|/tool|>"],
        ..HERMES
    },
    HERMES,
    Format {
        name: "pythonic",
        aliases: &["llama4_pythonic", "llama3_pythonic"],
        begin: &["<|python_start|>"],
        end: &["<|python_end|>"],
        drop: &["<|eot_id|>", "<|eot|>", "<|eom_id|>", "<|eom|>"],
        body: Body::Python,
        bare: true,
        template: &["[func_name1(params_name1=params_value1"],
        ..HERMES
    },
    Format {
        name: "llama3_json",
        aliases: &["llama4_json"],
        begin: &["<|python_tag|>"],
        end: &[],
        drop: &["<|eot_id|>", "<|eom_id|>"],
        bare: true,
        template: &["Environment: ipython"],
        ..HERMES
    },
    Format { name: "json", aliases: &["generic"], begin: &["```json"], end: &["```"], drop: &[], bare: true, template: &[], ..HERMES },
    Format { name: "think", aliases: &["reasoning"], begin: &[], end: &[], body: Body::None, template: &["</think>"], ..HERMES },
    Format { name: "text", aliases: &["none"], think: None, begin: &[], end: &[], drop: &[], body: Body::None, template: &[], ..HERMES },
];

impl Format {
    /// Returns the format with this name or alias.
    pub fn find(name: &str) -> Option<&'static Format> {
        FORMATS.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// Returns whether a response that follows the prompt begins inside of the reasoning.
    pub fn is_reasoning_after(&self, prompt: &str) -> bool {
        self.think.is_some_and(|think| think.open.iter().any(|tag| prompt.trim_end().ends_with(tag)))
    }

    /// Returns the format of the models that use this chat template, or the format without calls.
    pub fn detect(template: &str) -> &'static Format {
        let matches = |format: &&Format| !format.template.is_empty() && format.template.iter().all(|part| template.contains(part));
        FORMATS.iter().find(matches).unwrap_or(&FORMATS[FORMATS.len() - 1])
    }
}
