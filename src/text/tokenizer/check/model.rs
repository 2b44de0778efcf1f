//! Checks of the section `model`.

use serde_json::Value as Json;

use super::{MAX_AFFIX_BYTES, MAX_IDS, MAX_TOKEN_BYTES, SAVE_AGAIN, count, id, refusal, shown, string, string_or_null};

/// Maximum length in bytes of a token of a Unigram model. The crate drops its trie by a recursion
/// as deep as the longest token.
const MAX_UNIGRAM_TOKEN_BYTES: usize = 512;
/// Maximum total length in bytes of the tokens of a Unigram model. A node of its trie takes about
/// 400 bytes.
const MAX_UNIGRAM_BYTES: usize = 8 << 20;
/// Maximum length of a word of WordPiece. The work for a word grows with the square of its length.
const MAX_WORD_CHARS: u64 = 256;

/// Checks `model` and returns its type.
pub(in crate::text::tokenizer) fn check_model(model: &Json) -> Result<&str, String> {
    let kind = match &model["type"] {
        Json::String(kind) => kind,
        // The first versions of the format do not name the type.
        Json::Null if model.get("merges").is_some() => "BPE",
        _ => return Err(refusal("model.type", &format!("unknown ({})", shown(&model["type"])), SAVE_AGAIN)),
    };
    match kind {
        "BPE" => check_bpe(model)?,
        "WordPiece" => check_word_piece(model)?,
        "WordLevel" => check_vocabulary(&model["vocab"])?,
        "Unigram" => check_unigram(model)?,
        _ => return Err(refusal("model.type", &format!("unknown ({})", shown(&model["type"])), SAVE_AGAIN)),
    }
    string_or_null(&model["unk_token"], "model.unk_token", MAX_TOKEN_BYTES)?;
    Ok(kind)
}

fn check_bpe(model: &Json) -> Result<(), String> {
    let dropout = &model["dropout"];
    if !dropout.is_null() && dropout.as_f64() != Some(0.0) {
        let problem = format!("tokens would be random ({})", shown(dropout));
        return Err(refusal("model.dropout", &problem, "set it to null"));
    }
    string_or_null(&model["continuing_subword_prefix"], "model.continuing_subword_prefix", MAX_AFFIX_BYTES)?;
    string_or_null(&model["end_of_word_suffix"], "model.end_of_word_suffix", MAX_AFFIX_BYTES)?;
    check_vocabulary(&model["vocab"])
}

fn check_word_piece(model: &Json) -> Result<(), String> {
    string_or_null(&model["continuing_subword_prefix"], "model.continuing_subword_prefix", MAX_AFFIX_BYTES)?;
    count(&model["max_input_chars_per_word"], "model.max_input_chars_per_word", 0..=MAX_WORD_CHARS)?;
    check_vocabulary(&model["vocab"])
}

/// Checks that ids are small and unique. If two tokens shared an id, the meaning of the id would be
/// undefined.
fn check_vocabulary(vocabulary: &Json) -> Result<(), String> {
    let Some(entries) = vocabulary.as_object() else { return Err(refusal("model.vocab", "not an object", SAVE_AGAIN)) };
    let mut seen = vec![0_u64; MAX_IDS as usize / 64];
    for (token, value) in entries {
        let field = || format!("model.vocab[{}]", shown(&Json::from(token.as_str())));
        if token.len() > MAX_TOKEN_BYTES {
            let problem = format!("token too long ({} bytes, limit {MAX_TOKEN_BYTES})", token.len());
            return Err(refusal(&field(), &problem, "remove it"));
        }
        let id = value.as_u64().filter(|&id| id < MAX_IDS);
        let Some(id) = id else { return Err(super::id(value, &field()).expect_err("the id is out of range")) };
        let (word, bit) = (&mut seen[id as usize / 64], 1 << (id % 64));
        if *word & bit != 0 {
            return Err(refusal(&field(), &format!("another token has the same id ({id})"), SAVE_AGAIN));
        }
        *word |= bit;
    }
    Ok(())
}

fn check_unigram(model: &Json) -> Result<(), String> {
    let Some(entries) = model["vocab"].as_array() else { return Err(refusal("model.vocab", "not a list", SAVE_AGAIN)) };
    if entries.len() as u64 > MAX_IDS {
        let problem = format!("too many tokens ({}, limit {MAX_IDS})", entries.len());
        return Err(refusal("model.vocab", &problem, "use a smaller vocabulary"));
    }
    let mut bytes = 0;
    for (i, entry) in entries.iter().enumerate() {
        bytes += string(&entry[0], &format!("model.vocab[{i}][0]"), MAX_UNIGRAM_TOKEN_BYTES)?.len();
        if !entry[1].as_f64().is_some_and(f64::is_finite) {
            return Err(refusal(&format!("model.vocab[{i}][1]"), &format!("not a score ({})", shown(&entry[1])), SAVE_AGAIN));
        }
    }
    if bytes > MAX_UNIGRAM_BYTES {
        let problem = format!("too long together ({bytes} bytes, limit {MAX_UNIGRAM_BYTES})");
        return Err(refusal("model.vocab", &problem, "use a smaller vocabulary"));
    }
    let unknown = &model["unk_id"];
    if !unknown.is_null() && id(unknown, "model.unk_id")? as usize >= entries.len() {
        let problem = format!("not in the vocabulary ({}, {} tokens)", shown(unknown), entries.len());
        return Err(refusal("model.unk_id", &problem, SAVE_AGAIN));
    }
    Ok(())
}

/// Returns the merges of a BPE model as pairs of tokens of its vocabulary.
///
/// The crate copies a pair into a buffer as long as the longest token, and removes the prefix from
/// the second token without a check.
pub(in crate::text::tokenizer) fn bpe_merges(model: &Json) -> Result<Vec<(String, String)>, String> {
    let Some(list) = model["merges"].as_array() else { return Err(refusal("model.merges", "not a list", SAVE_AGAIN)) };
    let vocabulary = model["vocab"].as_object();
    let known = |token: &str| vocabulary.is_some_and(|vocabulary| vocabulary.contains_key(token));
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default();
    let mut merges = Vec::with_capacity(list.len());
    let mut merged = String::new();
    for (i, entry) in list.iter().enumerate() {
        if entry.as_str().is_some_and(|line| line.starts_with("#version")) {
            continue;
        }
        let field = || format!("model.merges[{i}]");
        let Some((left, right)) = sides(entry) else { return Err(refusal(&field(), "not a pair of tokens", SAVE_AGAIN)) };
        let Some(rest) = right.strip_prefix(prefix) else {
            let problem = format!("the second token does not begin with continuing_subword_prefix ({})", shown(entry));
            return Err(refusal(&field(), &problem, SAVE_AGAIN));
        };
        merged.clear();
        merged.push_str(left);
        merged.push_str(rest);
        if let Some(missing) = [left, right, &merged].into_iter().find(|token| !known(token)) {
            let problem = format!("not in the vocabulary ({})", shown(&Json::from(missing)));
            return Err(refusal(&field(), &problem, SAVE_AGAIN));
        }
        merges.push((left.to_string(), right.to_string()));
    }
    Ok(merges)
}

/// Returns both tokens of a merge: a list of two tokens, or in older files a line of two tokens.
fn sides(entry: &Json) -> Option<(&str, &str)> {
    match entry {
        Json::String(line) => line.split_once(' ').filter(|(_, right)| !right.contains(' ')),
        Json::Array(pair) if pair.len() == 2 => Some((pair[0].as_str()?, pair[1].as_str()?)),
        _ => None,
    }
}
