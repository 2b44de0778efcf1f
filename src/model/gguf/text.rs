//! The tokenizer and the chat template of a GGUF file, as the documents of Hugging Face:
//! `tokenizer.json` and `tokenizer_config.json`.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::{Metadata, Value};
use crate::error::{Error, Result};

/// The documents of a tokenizer.
#[derive(Debug)]
pub struct TextDocuments {
    /// As `tokenizer.json`.
    pub tokenizer: Json,
    /// As `tokenizer_config.json`.
    pub config: Json,
}

/// Kinds of tokens in `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// The words of LLaMA 3: at most three digits at a time.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of Qwen2: every digit is a word.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of Mistral NeMo: a word begins at an upper-case letter after lower-case ones.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of GPT-4o, which include contractions.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of DeepSeek V3: digits, then Chinese and Japanese, then the rest.
const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// The words of the first DeepSeek models: line ends, letters, punctuation, Chinese, Japanese and
/// Korean, numbers. The letters are those with cases in Unicode, except for Armenian and Georgian
/// lower case.
const DEEPSEEK_LLM: [&str; 6] = [
    r"[\r\n]",
    "\\s?[A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\
     \u{295}-\u{2AF}\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\
     \u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}\
     \u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\
     \u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\
     \u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}\
     \u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\
     \u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\
     \u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}\
     \u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}\
     \u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\
     \u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\
     \u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\
     \u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\
     \u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\
     \u{1E900}-\u{1E943}]+",
    "\\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+",
    r"\s+$",
    CHINESE_JAPANESE_KOREAN,
    r"\p{N}+",
];
const DEEPSEEK_CODER: [&str; 5] = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_JAPANESE_KOREAN, r"\p{N}"];
const CHINESE_JAPANESE_KOREAN: &str = "[\u{4E00}-\u{9FA5}\u{800}-\u{4E00}\u{AC00}-\u{D7FF}]+";
/// The words of BLOOM: all characters but spaces, parentheses, bars, and punctuation that ends a
/// sentence or its parts.
const BLOOM: &str = " ?[^(\\s|.,!?\u{2026}\u{3002}\u{FF0C}\u{3001}\u{964}\u{6D4}\u{60C})]+";

/// How a text is cut into words before tokens are merged.
#[derive(Clone, Copy)]
enum Words {
    /// Each pattern cuts the pieces of the preceding ones.
    Patterns(&'static [&'static str]),
    /// The words of GPT-2.
    Gpt2,
    /// As GPT-2, and every digit is a word.
    Gpt2Digits,
    /// As GPT-2, and punctuation and three digits are words.
    Falcon,
}

/// A form of tokenizers, with its names in `tokenizer.ggml.pre`.
struct Form {
    names: &'static [&'static str],
    words: Words,
    /// Whether texts become NFC.
    nfc: bool,
    /// Whether a word that is a token is not cut further. If so, the first token is added by
    /// default.
    ignore_merges: bool,
}

const FORMS: [Form; 15] = [
    Form {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "jina-es", "jina-de", "mellum", "a.x-4.0", "trillion"],
        words: Words::Gpt2,
        nfc: false,
        ignore_merges: false,
    },
    Form {
        names: &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        words: Words::Patterns(&[LLAMA3]),
        nfc: false,
        ignore_merges: true,
    },
    Form { names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], words: Words::Patterns(&[LLAMA3]), nfc: false, ignore_merges: false },
    Form { names: &["qwen2"], words: Words::Patterns(&[QWEN2]), nfc: true, ignore_merges: false },
    Form {
        names: &["stablelm2", "deepseek-r1-qwen", "kormo", "megrez", "hunyuan"],
        words: Words::Patterns(&[QWEN2]),
        nfc: false,
        ignore_merges: false,
    },
    Form { names: &["tekken"], words: Words::Patterns(&[TEKKEN]), nfc: false, ignore_merges: true },
    Form { names: &["gpt-4o", "llama4"], words: Words::Patterns(&[GPT4O]), nfc: false, ignore_merges: false },
    Form { names: &["deepseek-v3"], words: Words::Patterns(&DEEPSEEK3), nfc: false, ignore_merges: false },
    Form { names: &["deepseek-llm"], words: Words::Patterns(&DEEPSEEK_LLM), nfc: false, ignore_merges: false },
    Form { names: &["deepseek-coder"], words: Words::Patterns(&DEEPSEEK_CODER), nfc: false, ignore_merges: false },
    Form { names: &["bloom", "poro-chat", "gpt3-finnish"], words: Words::Patterns(&[BLOOM]), nfc: false, ignore_merges: false },
    Form { names: &["viking"], words: Words::Patterns(&[BLOOM, r"\p{N}"]), nfc: false, ignore_merges: false },
    Form { names: &["command-r"], words: Words::Gpt2Digits, nfc: true, ignore_merges: false },
    Form {
        names: &["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"],
        words: Words::Gpt2Digits,
        nfc: false,
        ignore_merges: false,
    },
    Form { names: &["falcon"], words: Words::Falcon, nfc: false, ignore_merges: false },
];

/// The tokens of a file.
struct Tokens<'a> {
    metadata: &'a Metadata,
    texts: &'a [String],
    /// `[tokens]`, or empty: all are normal.
    kinds: &'a [i64],
}

impl Tokens<'_> {
    /// Returns the id and the text of a token that the metadata name.
    fn named(&self, name: &str) -> Result<Option<(usize, &str)>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let id = self.metadata.whole(&key, self.texts.len().saturating_sub(1))?;
        Ok(id.map(|id| (id, self.texts[id].as_str())))
    }

    fn is_control(&self, id: usize) -> bool {
        self.kinds.get(id) == Some(&CONTROL)
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool> {
        let key = format!("tokenizer.ggml.{name}");
        match self.metadata.get(&key) {
            None => Ok(default),
            Some(Value::Flag(flag)) => Ok(*flag),
            Some(_) => Err(Error::model(format!("{key} is not a bool"))),
        }
    }

    /// Returns the tokens that are found in a text before words are.
    fn added(&self) -> Vec<Json> {
        let added = self.kinds.iter().enumerate().filter(|(_, kind)| [CONTROL, USER_DEFINED].contains(kind));
        let token = |(id, kind): (usize, &i64)| {
            json!({"id": id, "content": self.texts[id], "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *kind == CONTROL})
        };
        added.map(token).collect()
    }

    fn vocabulary(&self) -> Json {
        self.texts.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect::<Map<_, _>>().into()
    }

    /// Returns the document that adds a first and a last token. An end has the name of its flag,
    /// the name of its token, and whether it is added if the file has no flag.
    fn post_processor(&self, ends: [(&str, &str, bool); 2]) -> Result<Json> {
        let (mut template, mut tokens) = (vec![json!({"Sequence": {"id": "A", "type_id": 0}})], Map::new());
        for (end, (flag, name, default)) in ends.into_iter().enumerate() {
            if !self.flag(flag, default)? {
                continue;
            }
            let missing = || Error::model(format!("tokenizer.ggml.{flag} is true, and the file has no {name} token"));
            let (id, text) = self.named(name)?.ok_or_else(missing)?;
            let place = if end == 0 { 0 } else { template.len() };
            template.insert(place, json!({"SpecialToken": {"id": text, "type_id": 0}}));
            tokens.insert(text.into(), json!({"id": text, "ids": [id], "tokens": [text]}));
        }
        Ok(json!({"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": tokens}))
    }
}

/// The last token of most tokenizers.
const EOS: (&str, &str, bool) = ("add_eos_token", "eos", false);

/// Returns the documents of the tokenizer in a file.
pub fn documents(metadata: &Metadata) -> Result<TextDocuments> {
    let kind = metadata.text("tokenizer.ggml.model")?.ok_or_else(|| Error::model("tokenizer.ggml.model is missing"))?;
    let texts = match metadata.get("tokenizer.ggml.tokens") {
        Some(Value::Texts(texts)) if !texts.is_empty() => texts,
        _ => return Err(Error::model("tokenizer.ggml.tokens is not a list of texts, or has none")),
    };
    let kinds = match metadata.get("tokenizer.ggml.token_type") {
        None => &[][..],
        Some(Value::Integers(kinds)) if kinds.len() == texts.len() => kinds,
        Some(_) => return Err(Error::model(format!("tokenizer.ggml.token_type is not a list of {} whole numbers", texts.len()))),
    };
    let tokens = Tokens { metadata, texts, kinds };
    let tokenizer = match kind {
        "gpt2" => byte_level(&tokens)?,
        "llama" => sentence_piece(&tokens)?,
        "bert" => word_piece(&tokens)?,
        other => return Err(Error::unsupported(format!("tokenizer.ggml.model is {other:.80}; supported are gpt2, llama, bert"))),
    };
    Ok(TextDocuments { tokenizer, config: config(&tokens)? })
}

fn config(tokens: &Tokens) -> Result<Json> {
    // The class adds no tokens, and the empty list says that no other file names special tokens.
    let mut config = json!({"tokenizer_class": "PreTrainedTokenizer", "added_tokens_decoder": {}});
    for (name, key) in [("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")] {
        if let Some((_, text)) = tokens.named(name)? {
            config[key] = text.into();
        }
    }
    if let Some(template) = tokens.metadata.text("tokenizer.chat_template")? {
        config["chat_template"] = template.into();
    }
    Ok(config)
}

/// Byte pair encoding of the bytes of a text.
fn byte_level(tokens: &Tokens) -> Result<Json> {
    let merges = match tokens.metadata.get("tokenizer.ggml.merges") {
        Some(Value::Texts(merges)) => merges,
        _ => return Err(Error::model("tokenizer.ggml.merges is not a list of texts")),
    };
    let pair = |merge: &String| match merge.split_once(' ') {
        Some((left, right)) => Ok(json!([left, right])),
        None => Err(Error::model(format!("tokenizer.ggml.merges has {merge:.80}, which is no pair of tokens"))),
    };
    let merges = merges.iter().map(pair).collect::<Result<Vec<_>>>()?;
    let pre = tokens.metadata.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let Some(Form { words, nfc, ignore_merges, .. }) = FORMS.iter().find(|form| form.names.contains(&pre)) else {
        let known: Vec<_> = FORMS.iter().flat_map(|form| form.names).copied().collect();
        return Err(Error::unsupported(format!("tokenizer.ggml.pre is {pre:.80}; supported are {}", known.join(", "))));
    };
    Ok(json!({
        "version": "1.0",
        "added_tokens": tokens.added(),
        "normalizer": if *nfc { json!({"type": "NFC"}) } else { Json::Null },
        "pre_tokenizer": pre_tokenizer(*words),
        "post_processor": tokens.post_processor([("add_bos_token", "bos", *ignore_merges), EOS])?,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges, "vocab": tokens.vocabulary(), "merges": merges},
    }))
}

fn pre_tokenizer(words: Words) -> Json {
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let steps = match words {
        Words::Gpt2 => return bytes(true),
        Words::Gpt2Digits => vec![json!({"type": "Digits", "individual_digits": true}), bytes(true)],
        Words::Patterns(patterns) => patterns.iter().map(|pattern| split(pattern)).chain([bytes(false)]).collect(),
        Words::Falcon => vec![
            json!({"type": "Punctuation", "behavior": "Contiguous"}),
            bytes(true),
            json!({"type": "Digits", "individual_digits": false}),
            split("[0-9][0-9][0-9]"),
        ],
    };
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// The space in tokens of SentencePiece.
const SPACE: &str = "\u{2581}";

/// SentencePiece, whose pairs are merged in the order of the scores of their results.
fn sentence_piece(tokens: &Tokens) -> Result<Json> {
    let scores = match tokens.metadata.get("tokenizer.ggml.scores") {
        Some(Value::Floats(scores)) if scores.len() == tokens.texts.len() => scores,
        _ => return Err(Error::model(format!("tokenizer.ggml.scores is not a list of {} numbers", tokens.texts.len()))),
    };
    let prefix = tokens.flag("add_space_prefix", true)?;
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", SPACE)];
    let mut decoders = vec![replace(SPACE, " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unknown = tokens.named("unknown")?.map(|(_, text)| text);
    Ok(json!({
        "version": "1.0",
        "added_tokens": tokens.added(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": tokens.post_processor([("add_bos_token", "bos", true), EOS])?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": tokens.vocabulary(),
            "merges": merges_by_score(tokens.texts, scores)},
    }))
}

/// Returns every pair of tokens that together are a token, those with the highest score first.
fn merges_by_score(texts: &[String], scores: &[f32]) -> Vec<Json> {
    let ids: HashMap<&str, usize> = texts.iter().enumerate().map(|(id, text)| (text.as_str(), id)).collect();
    let mut merges = Vec::new();
    for (text, score) in texts.iter().zip(scores) {
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right)) {
                merges.push((*score, left, right));
            }
        }
    }
    merges.sort_by(|one, other| other.0.total_cmp(&one.0).then((one.1, one.2).cmp(&(other.1, other.2))));
    merges.into_iter().map(|(_, left, right)| json!([texts[left], texts[right]])).collect()
}

/// Prefix of a token within a word in Hugging Face. In files, tokens that begin a word have a
/// prefix.
const WITHIN_WORD: &str = "##";
/// Characters of the longest word that is not unknown.
const MAX_WORD: usize = 100;

/// WordPiece, the tokenizer of BERT: words without accents and in lower case.
fn word_piece(tokens: &Tokens) -> Result<Json> {
    let (unknown_id, _) = tokens.named("unknown")?.ok_or_else(|| Error::model("tokenizer.ggml.unknown_token_id is missing"))?;
    // Older files have the first token under another name.
    let first = if tokens.named("bos")?.is_some() { "bos" } else { "cls" };
    let text = |id: usize| match tokens.texts[id].strip_prefix(SPACE) {
        Some(word) => word.to_string(),
        None if tokens.is_control(id) || tokens.texts[id].starts_with('[') && tokens.texts[id].ends_with(']') => tokens.texts[id].clone(),
        None => format!("{WITHIN_WORD}{}", tokens.texts[id]),
    };
    let vocabulary: Map<_, _> = (0..tokens.texts.len()).map(|id| (text(id), id.into())).collect();
    Ok(json!({
        "version": "1.0",
        "added_tokens": tokens.added(),
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": tokens.post_processor([("add_bos_token", first, true), ("add_sep_token", "seperator", true)])?,
        "decoder": {"type": "WordPiece", "prefix": WITHIN_WORD, "cleanup": true},
        "model": {"type": "WordPiece", "vocab": vocabulary, "unk_token": text(unknown_id), "continuing_subword_prefix": WITHIN_WORD,
            "max_input_chars_per_word": MAX_WORD},
    }))
}
