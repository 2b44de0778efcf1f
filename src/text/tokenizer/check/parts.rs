//! Checks of normalizers, pre-tokenizers, decoders and post-processors.

use serde_json::Value as Json;

use super::{MAX_AFFIX_BYTES, SAVE_AGAIN, charsmap, count, flag, id, pattern, refusal, shown, string};

/// Maximum number of parts of one kind, including those within sequences. Each processes the whole
/// text.
const MAX_PARTS: usize = 32;
/// Maximum nesting of sequences. The crate recurses into them.
const MAX_NESTING: usize = 4;
/// Maximum number of pieces of a template, and of tokens of a piece.
const MAX_TEMPLATE: usize = 64;
/// Maximum length of a template's names in bytes.
const MAX_NAME_BYTES: usize = 1024;

/// The field, the type and the JSON of a part.
pub type PipelinePart<'a> = (String, &'a str, &'a Json);

/// Returns the parts of a section. The parts in the field `list` of a sequence replace the
/// sequence.
pub fn parts<'a>(section: &'a Json, name: &str, list: &str) -> Result<Vec<PipelinePart<'a>>, String> {
    let mut found = Vec::new();
    if !section.is_null() {
        add(section, name.to_string(), list, 0, &mut found)?;
    }
    Ok(found)
}

fn add<'a>(part: &'a Json, field: String, list: &str, nesting: usize, found: &mut Vec<PipelinePart<'a>>) -> Result<(), String> {
    let kind = string(&part["type"], &format!("{field}.type"), MAX_NAME_BYTES)?;
    if kind != "Sequence" {
        found.push((field, kind, part));
        return Ok(());
    }
    if nesting == MAX_NESTING {
        return Err(refusal(&field, &format!("sequences nest too deep (more than {MAX_NESTING})"), "put their parts into one"));
    }
    let Some(parts) = part[list].as_array() else { return Err(refusal(&format!("{field}.{list}"), "not a list", SAVE_AGAIN)) };
    for (i, part) in parts.iter().enumerate() {
        if found.len() == MAX_PARTS {
            return Err(refusal(&field, &format!("too many parts (more than {MAX_PARTS})"), "remove some"));
        }
        add(part, format!("{field}.{list}[{i}]"), list, nesting + 1, found)?;
    }
    Ok(())
}

fn unknown(field: &str, kind: &str) -> String {
    refusal(&format!("{field}.type"), &format!("unknown ({})", shown(&Json::from(kind))), SAVE_AGAIN)
}

/// Checks the normalizers. Returns the maximum growth factor of a text.
///
/// The factors of Unicode's forms are from its FAQ on normalization.
pub fn normalizers(section: &Json) -> Result<u64, String> {
    let mut expansion = 1_u64;
    for (field, kind, part) in parts(section, "normalizer", "normalizers")? {
        let factor = match kind {
            "BertNormalizer" | "Bert" => {
                for name in ["clean_text", "handle_chinese_chars", "lowercase"] {
                    flag(&part[name], &format!("{field}.{name}"))?;
                }
                if !part["strip_accents"].is_null() {
                    flag(&part["strip_accents"], &format!("{field}.strip_accents"))?;
                }
                12
            }
            "Strip" | "StripAccents" | "Nmt" => 1,
            "NFC" | "NFD" => 3,
            "NFKC" | "NFKD" => 11,
            "Lowercase" | "ByteLevel" => 2,
            "Precompiled" => {
                let field = format!("{field}.precompiled_charsmap");
                charsmap::check(string(&part["precompiled_charsmap"], &field, usize::MAX)?, &field)?.max(1)
            }
            "Replace" => pattern::replacement(part, &field)?,
            // The whole prefix is added to a text of one byte.
            "Prepend" => 1 + string(&part["prepend"], &format!("{field}.prepend"), MAX_AFFIX_BYTES)?.len() as u64,
            _ => return Err(unknown(&field, kind)),
        };
        expansion = expansion.saturating_mul(factor);
    }
    Ok(expansion)
}

/// Checks the pre-tokenizers. Returns the maximum growth factor of a text.
pub fn pre_tokenizers(section: &Json) -> Result<u64, String> {
    let mut expansion = 1_u64;
    for (field, kind, part) in parts(section, "pre_tokenizer", "pretokenizers")? {
        let factor = match kind {
            "BertPreTokenizer" | "Whitespace" | "WhitespaceSplit" | "Digits" | "Punctuation" | "UnicodeScripts" => 1,
            "Delimiter" | "CharDelimiterSplit" => 1,
            "Split" => {
                pattern::check(&part["pattern"], &format!("{field}.pattern"))?;
                1
            }
            // Adds a prefix to each word, then writes two bytes for each byte.
            "ByteLevel" if part["add_prefix_space"] == true => 4,
            "ByteLevel" => 2,
            // Adds a prefix to each word, and replaces each space.
            "Metaspace" => 2 * string(&part["replacement"], &format!("{field}.replacement"), 4)?.len().max(1) as u64,
            "FixedLength" => {
                let length = part.get("length").unwrap_or(&Json::Null);
                if !length.is_null() {
                    count(length, &format!("{field}.length"), 1..=1 << 20)?;
                }
                1
            }
            _ => return Err(unknown(&field, kind)),
        };
        expansion = expansion.saturating_mul(factor);
    }
    Ok(expansion)
}

/// Checks the decoders. Returns the maximum growth factor of a text.
pub fn decoders(section: &Json) -> Result<u64, String> {
    let mut expansion = 1_u64;
    for (field, kind, part) in parts(section, "decoder", "decoders")? {
        let text = |name: &str| string(&part[name], &format!("{field}.{name}"), MAX_AFFIX_BYTES);
        let factor = match kind {
            "ByteFallback" | "Fuse" | "Metaspace" => 1,
            // Bytes that are not UTF-8 become three bytes.
            "ByteLevel" => 3,
            "BPEDecoder" => text("suffix").map(|_| 2)?,
            "WordPiece" => text("prefix").map(|_| 2)?,
            "CTC" => text("pad_token").and(text("word_delimiter_token")).map(|_| 2)?,
            // The crate would run its searches without a bound.
            "Replace" if part["pattern"].get("String").is_none() => {
                return Err(refusal(&format!("{field}.pattern"), "a regular expression in a decoder", "replace a text: {\"String\": ..}"));
            }
            "Replace" => pattern::replacement(part, &field)?,
            "Strip" => {
                count(&part["start"], &format!("{field}.start"), 0..=1024)?;
                count(&part["stop"], &format!("{field}.stop"), 0..=1024)?;
                1
            }
            _ => return Err(unknown(&field, kind)),
        };
        expansion = expansion.saturating_mul(factor);
    }
    Ok(expansion)
}

/// Checks the post-processors. The crate ignores the type of a post-processor and reads its fields,
/// so fields are checked for every type.
pub fn post_processors(section: &Json) -> Result<(), String> {
    for (field, kind, part) in parts(section, "post_processor", "processors")? {
        if part.get("processors").is_some() {
            return Err(refusal(&format!("{field}.processors"), &format!("not a field of {kind}"), "remove it"));
        }
        for name in ["sep", "cls"] {
            let Some(token) = part.get(name) else { continue };
            string(&token[0], &format!("{field}.{name}[0]"), MAX_NAME_BYTES)?;
            id(&token[1], &format!("{field}.{name}[1]"))?;
        }
        if kind == "TemplateProcessing" || part.get("special_tokens").is_some() {
            template(part, &field)?;
        }
        if !["RobertaProcessing", "BertProcessing", "ByteLevel", "TemplateProcessing"].contains(&kind) {
            return Err(unknown(&field, kind));
        }
    }
    Ok(())
}

fn template(part: &Json, field: &str) -> Result<(), String> {
    let tokens = part["special_tokens"].as_object();
    let Some(tokens) = tokens else { return Err(refusal(&format!("{field}.special_tokens"), "not an object", SAVE_AGAIN)) };
    for (name, token) in tokens {
        let field = format!("{field}.special_tokens[{}]", shown(&Json::from(name.as_str())));
        let (ids, texts) = (token["ids"].as_array(), token["tokens"].as_array());
        let (Some(ids), Some(texts)) = (ids, texts) else { return Err(refusal(&field, "has no lists of ids and tokens", SAVE_AGAIN)) };
        if ids.len() != texts.len() || ids.len() > MAX_TEMPLATE {
            let problem = format!("wrong number of ids and tokens ({} and {}, at most {MAX_TEMPLATE})", ids.len(), texts.len());
            return Err(refusal(&field, &problem, "list as many tokens as ids"));
        }
        for value in ids {
            id(value, &format!("{field}.ids"))?;
        }
        for value in texts {
            string(value, &format!("{field}.tokens"), MAX_NAME_BYTES)?;
        }
    }
    for (name, sequences) in [("single", &["A"][..]), ("pair", &["A", "B"])] {
        let field = format!("{field}.{name}");
        let Some(pieces) = part[name].as_array() else { return Err(refusal(&field, "not a list", SAVE_AGAIN)) };
        if pieces.len() > MAX_TEMPLATE {
            let problem = format!("too many pieces ({}, limit {MAX_TEMPLATE})", pieces.len());
            return Err(refusal(&field, &problem, "remove some"));
        }
        check_pieces(pieces, sequences, tokens, &field)?;
    }
    Ok(())
}

/// Checks that each piece is a sequence of the template, at most once, or a declared special token.
fn check_pieces(pieces: &[Json], sequences: &[&str], tokens: &serde_json::Map<String, Json>, field: &str) -> Result<(), String> {
    let mut used = Vec::new();
    for (i, piece) in pieces.iter().enumerate() {
        let field = format!("{field}[{i}]");
        if let Some(token) = piece.get("SpecialToken") {
            let name = string(&token["id"], &format!("{field}.SpecialToken.id"), MAX_NAME_BYTES)?;
            if !tokens.contains_key(name) {
                let problem = format!("not among special_tokens ({})", shown(&token["id"]));
                return Err(refusal(&format!("{field}.SpecialToken.id"), &problem, "add it there"));
            }
        } else {
            let name = string(&piece["Sequence"]["id"], &format!("{field}.Sequence.id"), MAX_NAME_BYTES)?;
            if !sequences.contains(&name) || used.contains(&name) {
                let problem = format!("unknown or repeated sequence ({})", shown(&piece["Sequence"]["id"]));
                return Err(refusal(&format!("{field}.Sequence.id"), &problem, SAVE_AGAIN));
            }
            used.push(name);
        }
    }
    Ok(())
}
